// SPDX-License-Identifier: GPL-2.0-only
/*
 * Caps: while the host allows less than a CPU's highest performance (it is hot,
 * or somebody has lowered its limit), the policy's maximum is that. The scheduler
 * takes what is missing from the CPU's capacity (cpufreq pressure), and places
 * tasks as the host would. The same looks see to steal time.
 *
 * Cost: a tick compares two times. Four times a second, one tick of all CPUs
 * queues a look, which reads one register for each domain. An idle guest has no
 * ticks and looks at nothing: nothing is placed meanwhile. No tick of an isolated
 * CPU queues a look, and no look is done there.
 */

#include <linux/arch_topology.h>
#include <linux/cpufreq.h>
#include <linux/device.h>
#include <linux/err.h>
#include <linux/limits.h>
#include <linux/pm_qos.h>
#include <linux/workqueue.h>

#include "vcpufreq.h"

/* What a device without caps allows isn't known, nor after its server has gone. */
static s32 vcpufreq_host_cap(struct vcpufreq_domain *domain)
{
	unsigned int cpu = cpumask_first(&domain->cpus);
	u32 cap = 0;

	if (domain->vf->has_caps)
		cap = vcpufreq_read(domain->vf, cpu, VCPUFREQ_REG_PERF_CAP);

	if (!cap || cap >= vcpufreq_perf_max(domain) || cap > S32_MAX)
		cap = FREQ_QOS_MAX_DEFAULT_VALUE;

	return cap;
}

static void vcpufreq_caps_look(struct work_struct *work)
{
	struct vcpufreq_caps *caps = container_of(work, struct vcpufreq_caps, look);
	unsigned int cpu, sibling;
	s32 cap;

	mutex_lock(&caps->lock);
	for_each_possible_cpu(cpu) {
		struct vcpufreq_domain *domain = caps->vf->domain[cpu];

		if (cpu != cpumask_first(&domain->cpus) ||
		    !freq_qos_request_active(&domain->cap))
			continue;

		cap = vcpufreq_host_cap(domain);
		/* A limit of the host's is never taken for the guest's own. */
		if (cap < READ_ONCE(domain->host_cap))
			WRITE_ONCE(domain->host_cap, cap);
		freq_qos_update_request(&domain->cap, cap);
		WRITE_ONCE(domain->host_cap, cap);

		for_each_cpu(sibling, &domain->cpus)
			vcpufreq_steal_look(&caps->steal[sibling], sibling, cap);
	}
	mutex_unlock(&caps->lock);
}

/**
 * vcpufreq_caps_init() - prepare to look at caps and steal time
 * @vf:		the device, whose domains are known
 *
 * Return: 0 or -ENOMEM.
 */
int vcpufreq_caps_init(struct vcpufreq *vf)
{
	struct vcpufreq_caps *caps;

	caps = devm_kzalloc(vf->dev, sizeof(*caps), GFP_KERNEL);
	if (!caps)
		return -ENOMEM;

	caps->steal = devm_kcalloc(vf->dev, nr_cpu_ids, sizeof(*caps->steal), GFP_KERNEL);
	if (!caps->steal)
		return -ENOMEM;

	caps->queue = alloc_workqueue("vcpufreq", WQ_UNBOUND | WQ_FREEZABLE, 1);
	if (!caps->queue)
		return -ENOMEM;

	caps->vf = vf;
	caps->due = jiffies;
	INIT_WORK(&caps->look, vcpufreq_caps_look);
	mutex_init(&caps->lock);
	vf->caps = caps;

	return 0;
}

/**
 * vcpufreq_caps_exit() - undo vcpufreq_caps_init()
 * @vf:		the device, which no tick looks at any more
 */
void vcpufreq_caps_exit(struct vcpufreq *vf)
{
	destroy_workqueue(vf->caps->queue);
	mutex_destroy(&vf->caps->lock);
	vf->caps = NULL;
}

/**
 * vcpufreq_cap_start() - limit a policy's maximum to what the host allows
 * @domain:	the policy's domain
 * @policy:	the policy, which begins
 */
void vcpufreq_cap_start(struct vcpufreq_domain *domain,
			struct cpufreq_policy *policy)
{
	struct vcpufreq_caps *caps = domain->vf->caps;
	unsigned int cpu;
	int ret;
	s32 cap;

	/*
	 * A lower maximum counts as a share of this. The kernel knows it if it has
	 * the capacities from the device tree; with ACPI it is 0, or 1 in older ones.
	 */
	for_each_cpu(cpu, &domain->cpus)
		if (per_cpu(capacity_freq_ref, cpu) <= 1)
			per_cpu(capacity_freq_ref, cpu) = vcpufreq_perf_max(domain);

	mutex_lock(&caps->lock);
	cap = vcpufreq_host_cap(domain);
	WRITE_ONCE(domain->host_cap, cap);
	ret = freq_qos_add_request(&policy->constraints, &domain->cap,
				   FREQ_QOS_MAX, cap);
	for_each_cpu(cpu, &domain->cpus)
		vcpufreq_steal_start(&caps->steal[cpu], cpu);
	mutex_unlock(&caps->lock);
	if (ret < 0)
		dev_warn(domain->vf->dev, "domain %u: no caps: %d\n",
			 domain->id, ret);
}

/**
 * vcpufreq_cap_stop() - undo vcpufreq_cap_start()
 * @domain:	the domain, whose policy ends
 */
void vcpufreq_cap_stop(struct vcpufreq_domain *domain)
{
	struct vcpufreq_caps *caps = domain->vf->caps;
	unsigned int cpu;

	mutex_lock(&caps->lock);
	if (freq_qos_request_active(&domain->cap))
		freq_qos_remove_request(&domain->cap);
	for_each_cpu(cpu, &domain->cpus)
		vcpufreq_steal_stop(&caps->steal[cpu], cpu);
	mutex_unlock(&caps->lock);
}
