// SPDX-License-Identifier: GPL-2.0-only
/*
 * Steal time: while the host runs something else where a vCPU is ready to run, the
 * CPU has that much less to give. The scheduler takes the share from the CPU's
 * capacity (hardware pressure), and places tasks where the host leaves more time.
 *
 * A share rises at once, and falls as soon as the CPU is busy without steal time.
 * It falls slowly while the CPU is idle: a CPU that tasks have left has no steal
 * time, whatever the host still runs there.
 *
 * A kernel with CONFIG_PARAVIRT_TIME_ACCOUNTING takes steal time from the capacity
 * by itself; the share stays 0 there.
 */

#include <linux/arch_topology.h>
#include <linux/kconfig.h>
#include <linux/kernel_stat.h>
#include <linux/ktime.h>
#include <linux/limits.h>
#include <linux/math.h>
#include <linux/math64.h>
#include <linux/minmax.h>
#include <linux/sched.h>
#include <linux/time64.h>

#include "vcpufreq.h"

/* Less than this is the host's housekeeping, and no reason to move a task. */
#define VCPUFREQ_STEAL_MIN	(SCHED_CAPACITY_SCALE / 32)

/* Until the share of a CPU that is idle has fallen from all of the CPU to nothing. */
#define VCPUFREQ_STEAL_FALL_NS	(4 * NSEC_PER_SEC)

static u64 vcpufreq_steal_ns(unsigned int cpu)
{
	return kcpustat_cpu(cpu).cpustat[CPUTIME_STEAL];
}

static u64 vcpufreq_busy_ns(unsigned int cpu)
{
	const u64 *cpustat = kcpustat_cpu(cpu).cpustat;

	return cpustat[CPUTIME_USER] + cpustat[CPUTIME_NICE] + cpustat[CPUTIME_SYSTEM];
}

/*
 * Of SCHED_CAPACITY_SCALE: what the host takes, once @stolen and @busy are known. The
 * kernel accounts both late, at ticks, and what the host calls steal time isn't
 * trusted: all is bounded.
 */
static unsigned int vcpufreq_steal_share(struct vcpufreq_steal *steal, u64 stolen,
					 u64 busy, u64 now)
{
	u64 elapsed = max(now - steal->looked_at, (u64)NSEC_PER_MSEC);
	u64 taken = min(stolen - steal->stolen, elapsed);
	u64 ran = min(busy - steal->busy, elapsed - taken);
	u64 fall = div64_u64(steal->peak * ran, elapsed) +
		   div64_u64(elapsed * SCHED_CAPACITY_SCALE, VCPUFREQ_STEAL_FALL_NS);
	u64 share = div64_u64(taken * SCHED_CAPACITY_SCALE, elapsed);

	steal->stolen = stolen;
	steal->busy = busy;
	steal->looked_at = now;
	share = max(share, steal->peak - min(fall, steal->peak));
	/* Something is always left. */
	steal->peak = min(share, (u64)SCHED_CAPACITY_SCALE - VCPUFREQ_STEAL_MIN);

	return steal->peak < VCPUFREQ_STEAL_MIN ? 0 : steal->peak;
}

/**
 * vcpufreq_steal_look() - take what the host has stolen from a CPU's capacity
 * @steal:	what is known of the CPU
 * @cpu:	the CPU
 * @cap:	the most that its domain can get now, in kHz
 *
 * The scheduler counts the greater of this pressure and that of a lower maximum.
 * Of a CPU that has both, this one is their product.
 */
void vcpufreq_steal_look(struct vcpufreq_steal *steal, unsigned int cpu, u32 cap)
{
	u32 max = min(cap, per_cpu(capacity_freq_ref, cpu));
	unsigned int share;

	if (IS_ENABLED(CONFIG_PARAVIRT_TIME_ACCOUNTING))
		return;

	share = vcpufreq_steal_share(steal, vcpufreq_steal_ns(cpu),
				     vcpufreq_busy_ns(cpu), ktime_get_ns());
	if (!share && !steal->share)
		return;

	steal->share = share;
	topology_update_hw_pressure(cpumask_of(cpu), share ?
		mult_frac(max, SCHED_CAPACITY_SCALE - share, SCHED_CAPACITY_SCALE) :
		ULONG_MAX);
}

/**
 * vcpufreq_steal_start() - forget what the host stole before
 * @steal:	what becomes known of the CPU
 * @cpu:	the CPU
 */
void vcpufreq_steal_start(struct vcpufreq_steal *steal, unsigned int cpu)
{
	*steal = (struct vcpufreq_steal) {
		.stolen = vcpufreq_steal_ns(cpu),
		.busy = vcpufreq_busy_ns(cpu),
		.looked_at = ktime_get_ns(),
	};
}

/**
 * vcpufreq_steal_stop() - give a CPU its capacity back
 * @steal:	what is known of the CPU
 * @cpu:	the CPU
 */
void vcpufreq_steal_stop(struct vcpufreq_steal *steal, unsigned int cpu)
{
	if (steal->share)
		topology_update_hw_pressure(cpumask_of(cpu), ULONG_MAX);

	steal->share = 0;
}
