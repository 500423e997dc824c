// SPDX-License-Identifier: GPL-2.0-only
/* The built-in rule's clamp, by the VMM's thread. */
#include "vcpufreq_policy.h"

VCPUFREQ_POLICY(later)
{
	answer->defer = 1;
}
