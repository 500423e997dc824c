// SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause)
/*
 * For 20 ms after a vCPU has woken up, it gets the most that it could ask for.
 *
 * Wrong when: it neither sleeps nor asks again. Then the boost lasts until the
 * VMM looks, 100 ms at most.
 */
#include "vcpufreq_policy.h"

#define BOOST_NS	20000000ull

VCPUFREQ_POLICY(boost)
{
	if (!ask->woken_ns || ask->now_ns - ask->woken_ns >= BOOST_NS)
		return;
	/* The guest limits the task that runs: that stays. */
	if (answer->max < 1024)
		return;
	if (answer->min < ask->limit)
		answer->min = ask->limit;
}
