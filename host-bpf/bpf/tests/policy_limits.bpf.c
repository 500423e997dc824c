// SPDX-License-Identifier: GPL-2.0-only
/* A clamp below the VM's limits, if it has a lower one. */
#include "vcpufreq_policy.h"

VCPUFREQ_POLICY(limits)
{
	answer->min = 0;
	answer->max = 0;
}
