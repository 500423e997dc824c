// SPDX-License-Identifier: GPL-2.0-only
/*
 * Ceilings: a request is what the host gives at least. A task that the guest
 * holds down (uclamp.max) or a policy that it limits (scaling_max_freq) is busy
 * for long, and the host sees a busy vCPU, which it would speed up. While such
 * a task runs, the driver marks requests as the most, too.
 *
 * The host ends a ceiling that is not written again within a tick, or a lost
 * request would keep a vCPU slow. The governor looks at each tick of a busy CPU:
 * a request that it does not change is what it wants, and the tick writes it
 * again.
 *
 * Cost: a tick compares a few values. While a task runs that the guest holds
 * down, one tick of the domain's CPUs writes a register, every 4 ms or each tick.
 */

#include <linux/arch_topology.h>
#include <linux/build_bug.h>
#include <linux/cpufreq.h>
#include <linux/jiffies.h>
#include <linux/math.h>
#include <linux/minmax.h>
#include <linux/percpu.h>
#include <linux/pm_qos.h>
#include <linux/sched.h>

#include "vcpufreq.h"

/* How often a domain's ceiling is written again: one write exits, or takes a token. */
#define VCPUFREQ_RENEWAL	DIV_ROUND_UP(HZ, 250)

/* How long it holds: until the next tick has written it, which may be late. */
#define VCPUFREQ_CEILING_MS	((u32)(MSEC_PER_SEC * VCPUFREQ_RENEWAL / HZ) + 1)
static_assert(VCPUFREQ_CEILING_MS <= VCPUFREQ_CEILING_MS_MAX);

/* How long a task that was held down in a tick counts: it may sleep in between. */
#define VCPUFREQ_LIMITED_MS 12

/* With @lock: a tick that renews a request must not come behind the next one. */
static void vcpufreq_write_request(struct vcpufreq_domain *domain, bool ceiling)
{
	u32 held = ceiling ? VCPUFREQ_CEILING_MS << VCPUFREQ_CEILING_SHIFT : 0;

	if (ceiling)
		domain->renew_at = jiffies + VCPUFREQ_RENEWAL;
	vcpufreq_write(domain->vf, domain->page, VCPUFREQ_REG_SET_PERF,
		       domain->request | held);
}

/* A task with a limit has run lately. At the maximum there is nothing to forbid. */
static bool vcpufreq_wants_ceiling(const struct vcpufreq_domain *domain)
{
	u32 request = domain->request;

	return request && request < vcpufreq_perf_max(domain) &&
	       READ_ONCE(domain->limited) &&
	       time_before(jiffies, READ_ONCE(domain->limited_at) +
				    msecs_to_jiffies(VCPUFREQ_LIMITED_MS));
}

/**
 * vcpufreq_ask() - write a request
 * @domain:	the domain that it is for
 * @cpu:	the CPU whose register gets it
 * @perf:	kHz, or 0 to withdraw the last one
 */
void vcpufreq_ask(struct vcpufreq_domain *domain, unsigned int cpu, u32 perf)
{
	unsigned long flags;

	if (!domain->vf->has_ceilings) {
		vcpufreq_write(domain->vf, cpu, VCPUFREQ_REG_SET_PERF, perf);
		return;
	}

	raw_spin_lock_irqsave(&domain->lock, flags);
	domain->request = perf;
	domain->page = cpu;
	vcpufreq_write_request(domain, vcpufreq_wants_ceiling(domain));
	raw_spin_unlock_irqrestore(&domain->lock, flags);
}

#ifdef CONFIG_GENERIC_ARCH_TOPOLOGY
/* Whether the current task may not use this CPU's full performance. */
static bool vcpufreq_is_limited(const struct vcpufreq_domain *domain)
{
	const struct freq_constraints *limits = &domain->policy->constraints;
	s32 most = min_t(s32, vcpufreq_perf_max(domain), READ_ONCE(domain->host_cap));

	/* Not the policy's maximum: that is a level, and the host's cap needn't be one. */
	if (READ_ONCE(limits->max_freq.target_value) < most)
		return true;
#ifdef CONFIG_UCLAMP_TASK
	return current->uclamp[UCLAMP_MAX].active &&
	       current->uclamp[UCLAMP_MAX].value < this_cpu_read(cpu_scale);
#else
	return false;
#endif
}

/**
 * vcpufreq_ceiling_tick() - renew the ceiling of a domain that holds itself down
 * @domain:	the domain of this CPU, which is in a tick
 */
void vcpufreq_ceiling_tick(struct vcpufreq_domain *domain)
{
	if (is_idle_task(current) || !vcpufreq_is_limited(domain))
		return;

	WRITE_ONCE(domain->limited_at, jiffies);
	WRITE_ONCE(domain->limited, true);

	/* Else another CPU of the domain writes meanwhile. */
	if (!raw_spin_trylock(&domain->lock))
		return;
	if (vcpufreq_wants_ceiling(domain) && !time_before(jiffies, domain->renew_at))
		vcpufreq_write_request(domain, true);
	raw_spin_unlock(&domain->lock);
}
#endif
