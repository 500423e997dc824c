// SPDX-License-Identifier: GPL-2.0-only
/*
 * Energy model, so that the guest can schedule energy-aware: power per OPP
 * from the device tree (opp-microwatt, or dynamic-power-coefficient with
 * opp-microvolt); without OPPs there, power per level from a device that gives
 * it. Without power all else works.
 *
 * The kernel never drops the energy model of a CPU. One that an earlier load
 * of this driver registered is kept if it still describes these CPUs.
 */

#include <linux/cpu.h>
#include <linux/device.h>
#include <linux/energy_model.h>
#include <linux/err.h>
#include <linux/pm_opp.h>
#include <linux/units.h>

#include "vcpufreq.h"

static bool vcpufreq_is_opp(struct device *cpu_dev, u32 khz)
{
	struct dev_pm_opp *opp;

	opp = dev_pm_opp_find_freq_exact(cpu_dev, khz * HZ_PER_KHZ, true);
	if (IS_ERR(opp))
		return false;
	dev_pm_opp_put(opp);

	return true;
}

static u32 vcpufreq_highest_opp(struct device *cpu_dev)
{
	unsigned long hz = ULONG_MAX;
	struct dev_pm_opp *opp;

	opp = dev_pm_opp_find_freq_floor(cpu_dev, &hz);
	if (IS_ERR(opp))
		return 0;
	dev_pm_opp_put(opp);

	return hz / HZ_PER_KHZ;
}

/*
 * The scheduler looks up a frequency of the policy in the energy model, so
 * one must be the other. A CPU without a table may be asked for anything in
 * between its OPPs, but its highest must be theirs.
 */
static bool vcpufreq_opps_agree(const struct vcpufreq_domain *domain,
				struct device *cpu_dev)
{
	struct device *dev = domain->vf->dev;
	int nr_opps = dev_pm_opp_get_opp_count(cpu_dev);
	u32 highest = vcpufreq_highest_opp(cpu_dev);
	unsigned int i;

	if (highest != vcpufreq_perf_max(domain)) {
		dev_warn(dev, "%s: no energy model: its highest OPP is %u kHz, the host's highest level %u kHz\n",
			 dev_name(cpu_dev), highest, vcpufreq_perf_max(domain));
		return false;
	}

	if (!vcpufreq_has_table(domain))
		return true;

	if (nr_opps != domain->nr_perf) {
		dev_warn(dev, "%s: no energy model: it has %d OPPs, the host %u levels\n",
			 dev_name(cpu_dev), nr_opps, domain->nr_perf);
		return false;
	}

	for (i = 0; i < domain->nr_perf; i++) {
		u32 khz = domain->table[i].frequency;

		if (!vcpufreq_is_opp(cpu_dev, khz)) {
			dev_warn(dev, "%s: no energy model: no OPP has the host's level %u kHz\n",
				 dev_name(cpu_dev), khz);
			return false;
		}
	}

	return true;
}

/**
 * vcpufreq_em_init() - add the OPPs of a domain's CPUs, if there are any
 * @domain:	the domain
 *
 * -EOPNOTSUPP is that of a kernel without device trees.
 */
void vcpufreq_em_init(struct vcpufreq_domain *domain)
{
	unsigned int cpu = cpumask_first(&domain->cpus);
	int ret;

	domain->em_usable = false;
	ret = dev_pm_opp_of_cpumask_add_table(&domain->cpus);
	domain->has_opps = !ret;
	if (ret == -ENODEV || ret == -EOPNOTSUPP) {
		domain->em_usable = domain->has_power;
		dev_dbg(domain->vf->dev, "CPU%u: no OPPs in the device tree\n",
			cpu);
		return;
	}
	if (ret) {
		dev_warn(domain->vf->dev, "CPU%u: no energy model: cannot read the OPPs of the device tree: %pe\n",
			 cpu, ERR_PTR(ret));
		return;
	}

	domain->em_usable = vcpufreq_opps_agree(domain, get_cpu_device(cpu));
}

/**
 * vcpufreq_em_exit() - drop the OPPs that vcpufreq_em_init() added
 * @domain:	the domain
 */
void vcpufreq_em_exit(struct vcpufreq_domain *domain)
{
	if (domain->has_opps)
		dev_pm_opp_of_cpumask_remove_table(&domain->cpus);
	domain->has_opps = false;
}

static bool vcpufreq_em_fits(struct em_perf_domain *pd,
			     const struct vcpufreq_domain *domain)
{
	const struct em_perf_state *state;
	int i;

	if (!cpumask_equal(em_span_cpus(pd), &domain->cpus))
		return false;

	guard(rcu)();
	state = em_perf_state_from_pd(pd);
	if (!vcpufreq_has_table(domain))
		return state[pd->nr_perf_states - 1].frequency ==
		       vcpufreq_perf_max(domain);

	if (pd->nr_perf_states != domain->nr_perf)
		return false;

	for (i = 0; i < pd->nr_perf_states; i++)
		if (state[i].frequency != domain->table[i].frequency)
			return false;

	return true;
}

/*
 * Levels that the model calls inefficient are skipped by the scheduler's
 * estimates. The first registration marked the policy of that time; mark
 * this one too, or it would use levels that are never estimated.
 */
static void vcpufreq_em_reuse(struct cpufreq_policy *policy,
			      struct em_perf_domain *pd)
{
	const struct em_perf_state *state;
	int i;

	if (!policy->freq_table)
		return;

	guard(rcu)();
	state = em_perf_state_from_pd(pd);
	for (i = 0; i < pd->nr_perf_states; i++)
		if (state[i].flags & EM_PERF_STATE_INEFFICIENT)
			cpufreq_table_set_inefficient(policy,
						      state[i].frequency);
}

/* Of the lowest level that isn't below the frequency. */
static int __maybe_unused vcpufreq_em_power(struct device *cpu_dev,
					    unsigned long *uw,
					    unsigned long *khz)
{
	const struct vcpufreq *vf = cpufreq_get_driver_data();
	const struct vcpufreq_domain *domain = vf->domain[cpu_dev->id];
	unsigned int i;

	for (i = 0; i < domain->nr_perf; i++) {
		if (domain->table[i].frequency < *khz)
			continue;
		*khz = domain->table[i].frequency;
		*uw = domain->power[i];
		return 0;
	}

	return -EINVAL;
}

static void vcpufreq_em_from_opps(struct vcpufreq_domain *domain,
				  struct device *cpu_dev)
{
	int ret = dev_pm_opp_of_register_em(cpu_dev, &domain->cpus);

	if (ret)
		dev_info(domain->vf->dev, "%s: no energy model: %pe; it needs opp-microwatt, or dynamic-power-coefficient and opp-microvolt, for each OPP\n",
			 dev_name(cpu_dev), ERR_PTR(ret));
}

static void vcpufreq_em_from_device(struct vcpufreq_domain *domain,
				    struct device *cpu_dev)
{
	struct em_data_callback power = EM_DATA_CB(vcpufreq_em_power);
	int ret;

	ret = em_dev_register_perf_domain(cpu_dev, domain->nr_perf, &power,
					  &domain->cpus, true);
	if (ret)
		dev_info(domain->vf->dev, "%s: no energy model: %pe with the device's power\n",
			 dev_name(cpu_dev), ERR_PTR(ret));
}

/**
 * vcpufreq_em_register() - give the CPUs of a new policy an energy model
 * @policy:	the policy
 */
void vcpufreq_em_register(struct cpufreq_policy *policy)
{
	struct vcpufreq_domain *domain = policy->driver_data;
	struct device *cpu_dev = get_cpu_device(policy->cpu);
	struct em_perf_domain *pd = em_pd_get(cpu_dev);

	if (pd) {
		if (vcpufreq_em_fits(pd, domain))
			vcpufreq_em_reuse(policy, pd);
		else
			dev_warn(domain->vf->dev, "%s: the energy model registered earlier has other CPUs or frequencies; reboot to change it\n",
				 dev_name(cpu_dev));
		return;
	}

	if (!domain->em_usable)
		return;

	if (domain->has_opps)
		vcpufreq_em_from_opps(domain, cpu_dev);
	else
		vcpufreq_em_from_device(domain, cpu_dev);
}
