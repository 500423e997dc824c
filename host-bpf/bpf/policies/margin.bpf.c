// SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause)
/*
 * Asks for 10 % more than the guest does.
 */
#include "vcpufreq_policy.h"

VCPUFREQ_POLICY(margin)
{
	__u32 more = ask->min + ask->min / 10;

	if (more > ask->limit)
		more = ask->limit;
	answer->min = more;
	/* A request that is a ceiling too. */
	if (answer->max < 1024)
		answer->max = more;
}
