// SPDX-License-Identifier: GPL-2.0-only
/* No clamp. */
#include "vcpufreq_policy.h"

VCPUFREQ_POLICY(nonsense)
{
	answer->min = 5000;
	answer->max = 3;
}
