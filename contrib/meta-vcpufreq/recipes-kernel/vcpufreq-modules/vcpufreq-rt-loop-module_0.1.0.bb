# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
SUMMARY = "Periodic loop of a real-time task"
DESCRIPTION = "A thread of the kernel that wakes every 10 ms, to measure a real-time host or guest."

VCPUFREQ_MODULE = "rt/module"
VCPUFREQ_OBJECT = "vcpufreq_rt_loop"

require vcpufreq-module.inc
