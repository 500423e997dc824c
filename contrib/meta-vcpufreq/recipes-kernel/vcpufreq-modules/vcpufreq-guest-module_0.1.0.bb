# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
SUMMARY = "Driver of a guest's vCPUs"
DESCRIPTION = "Tells a guest's scheduler how big and fast its CPUs are, and the host what it requests."

VCPUFREQ_MODULE = "guest-driver"
VCPUFREQ_OBJECT = "vcpufreq_guest"

require vcpufreq-module.inc
