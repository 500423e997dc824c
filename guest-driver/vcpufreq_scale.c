// SPDX-License-Identifier: GPL-2.0-only
/*
 * Frequency invariance: at each tick the scheduler learns which share of its
 * highest performance this CPU runs at now, from the host's cur_perf.
 *
 * The guest's request is a poor measure of that: the host may run faster
 * (others ask for more), slower (thermal limits) or later.
 *
 * Cost: one register read and one multiplication a tick. Of the kernel's
 * sources, counters in the CPU (AMU) go first; where they are in use this
 * one stays unused.
 */

#include <linux/arch_topology.h>
#include <linux/math64.h>
#include <linux/percpu.h>
#include <linux/sched.h>
#include <linux/sched/isolation.h>

#include "vcpufreq.h"

/* Binary places of vcpufreq_scale.factor. */
#define VCPUFREQ_FACTOR_SHIFT 32

/**
 * struct vcpufreq_scale - what the tick needs to know about its CPU
 * @vf:		the device to ask
 * @domain:	whose ceiling to renew; NULL on an isolated CPU, or without ceilings
 * @perf_max:	highest performance of this CPU, kHz, above 0
 * @caps:	what looks at caps and steal time; NULL on an isolated CPU, whose ticks
 *		are its tasks'
 * @factor:	SCHED_CAPACITY_SCALE / @perf_max, so that nothing is divided
 *		in the tick; rounded up, so that @perf_max gives full scale
 */
struct vcpufreq_scale {
	const struct vcpufreq *vf;
	struct vcpufreq_caps *caps;
	struct vcpufreq_domain *domain;
	u32 perf_max;
	u64 factor;
};

static DEFINE_PER_CPU(struct vcpufreq_scale, vcpufreq_scale);

static u64 vcpufreq_factor(u32 perf_max)
{
	return DIV64_U64_ROUND_UP((u64)SCHED_CAPACITY_SCALE << VCPUFREQ_FACTOR_SHIFT,
				  perf_max);
}

static void vcpufreq_scale_tick(void)
{
	const struct vcpufreq_scale *s = this_cpu_ptr(&vcpufreq_scale);
	u32 perf = vcpufreq_read(s->vf, smp_processor_id(),
				 VCPUFREQ_REG_CUR_PERF);
	u64 scale;

	if (s->caps)
		vcpufreq_caps_tick(s->caps);
	if (s->domain)
		vcpufreq_ceiling_tick(s->domain);

	/* The host doesn't know: its last value is the best guess. */
	if (!perf)
		return;

	/*
	 * All ones: the device or its server has gone. That is full scale, as
	 * without a driver: the last value may be an idle moment's, and with it
	 * every load would look small until another server comes.
	 *
	 * At most 2^42 + perf_max, as perf is at most perf_max.
	 */
	scale = (min(perf, s->perf_max) * s->factor) >> VCPUFREQ_FACTOR_SHIFT;

	/* At 0 no load would ever be seen again, and nothing asked for. */
	scale = clamp_t(u64, scale, 1, SCHED_CAPACITY_SCALE);
	this_cpu_write(arch_freq_scale, scale);
}

static struct scale_freq_data vcpufreq_scale_source = {
	.source = SCALE_FREQ_SOURCE_VIRT,
	.set_freq_scale = vcpufreq_scale_tick,
};

/**
 * vcpufreq_scale_start() - let the ticks of a domain's CPUs ask the host
 * @domain:	the domain
 *
 * May sleep: the first source makes the scheduler rebuild its domains.
 */
void vcpufreq_scale_start(struct vcpufreq_domain *domain)
{
	u32 perf_max = vcpufreq_perf_max(domain);
	unsigned int cpu;

	for_each_cpu(cpu, &domain->cpus) {
		struct vcpufreq_scale *s = per_cpu_ptr(&vcpufreq_scale, cpu);
		bool isolated = !housekeeping_test_cpu(cpu, HK_TYPE_DOMAIN);

		s->vf = domain->vf;
		s->caps = isolated ? NULL : domain->vf->caps;
		s->domain = isolated || !domain->vf->has_ceilings ? NULL : domain;
		s->perf_max = perf_max;
		s->factor = vcpufreq_factor(perf_max);
	}

	topology_set_scale_freq_source(&vcpufreq_scale_source, &domain->cpus);
}

/**
 * vcpufreq_scale_stop() - undo vcpufreq_scale_start()
 * @domain:	the domain
 *
 * Waits until no tick uses the source any more. Without a source nothing
 * updates the scale, so it goes back to what it was before: full speed.
 */
void vcpufreq_scale_stop(const struct vcpufreq_domain *domain)
{
	unsigned int cpu;

	topology_clear_scale_freq_source(SCALE_FREQ_SOURCE_VIRT, &domain->cpus);

	for_each_cpu(cpu, &domain->cpus)
		WRITE_ONCE(per_cpu(arch_freq_scale, cpu), SCHED_CAPACITY_SCALE);
}
