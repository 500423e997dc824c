// SPDX-License-Identifier: GPL-2.0-only
/* A loop without an end. */
#include "vcpufreq_policy.h"

VCPUFREQ_POLICY(loop)
{
	volatile __u32 turns = 1;

	while (turns)
		answer->min = turns;
}
