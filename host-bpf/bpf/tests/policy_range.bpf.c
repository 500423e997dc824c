// SPDX-License-Identifier: GPL-2.0-only
/* A read behind what is known of a request. */
#include "vcpufreq_policy.h"

VCPUFREQ_POLICY(range)
{
	const __u32 *words = (const __u32 *)ask;

	answer->min = words[ask->vcpu + 64];
}
