# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
SUMMARY = "Requests of guests in force at once"
DESCRIPTION = "Lets requests that BPF programs handle be in force before the guest goes on. Needs BTF."

VCPUFREQ_MODULE = "host-bpf/module"
VCPUFREQ_OBJECT = "vcpufreq_host"

require vcpufreq-module.inc
