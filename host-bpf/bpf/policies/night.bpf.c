// SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause)
/*
 * Between 22:00 and 6:00 a vCPU gets half of what it could ask for, at most.
 *
 * CLOCK_TAI is UTC, or 37 s ahead of it. OFFSET is the local time's from UTC.
 */
#include "vcpufreq_policy.h"

#define NS_PER_S	1000000000ull
#define HOUR		3600
#define DAY		(24 * HOUR)
#define OFFSET		0
#define BEGINS		(22 * HOUR)
#define ENDS		(6 * HOUR)

VCPUFREQ_POLICY(night)
{
	__u64 second = (bpf_ktime_get_tai_ns() / NS_PER_S + OFFSET) % DAY;
	__u32 cap = ask->limit / 2;

	if (second >= ENDS && second < BEGINS)
		return;
	if (cap < ask->floor)
		cap = ask->floor;
	if (answer->max > cap)
		answer->max = cap;
	if (answer->min > cap)
		answer->min = cap;
}
