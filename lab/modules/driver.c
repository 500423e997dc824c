// SPDX-License-Identifier: GPL-2.0-only
/*
 * cpufreq driver of the lab's emulated host.
 *
 * The board has no clock to set: this driver only remembers the OPP, and tells
 * the energy counter and the speed model. Everything else is as a real driver
 * has it: OPPs, sharing and power from the device tree, fast switch, updates
 * from any CPU, a governor per policy, an energy model.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cpu.h>
#include <linux/cpufreq.h>
#include <linux/math64.h>
#include <linux/module.h>
#include <linux/of.h>
#include <linux/pm_opp.h>
#include <linux/slab.h>

#include "lab_cpufreq.h"

/* Without clock-latency-ns in the OPPs: a round figure for a firmware clock. */
#define LAB_LATENCY_NS	(50 * NSEC_PER_USEC)

static unsigned int transition_delay_us = 1000;
module_param(transition_delay_us, uint, 0444);
MODULE_PARM_DESC(transition_delay_us,
		 "schedutil's shortest time between two changes of a policy, in us");

/**
 * struct lab_policy - what the driver keeps for a policy
 * @cpu_dev: a CPU of it, to which the OPP table belongs
 * @opp: index of the OPP in force
 * @opps: number of OPPs, lowest first
 * @top: index of the highest OPP that is not for boost
 * @power_uw: power of one busy CPU at each OPP, in uW
 */
struct lab_policy {
	struct device *cpu_dev;
	unsigned int opp;
	unsigned int opps;
	unsigned int top;
	u32 power_uw[LAB_OPPS_MAX];
};

static void lab_set_opp(struct cpufreq_policy *policy,
			const struct cpumask *cpus, unsigned int opp)
{
	struct lab_policy *lab = policy->driver_data;

	WRITE_ONCE(lab->opp, opp);
	lab_energy_set_opp(cpus, opp);
	lab_speed_set_freq(cpus, policy->freq_table[opp].frequency);
}

static unsigned int lab_get(unsigned int cpu)
{
	struct cpufreq_policy *policy = cpufreq_cpu_get_raw(cpu);
	struct lab_policy *lab;

	if (!policy)
		return 0;
	lab = policy->driver_data;
	return policy->freq_table[READ_ONCE(lab->opp)].frequency;
}

static int lab_target_index(struct cpufreq_policy *policy, unsigned int opp)
{
	lab_set_opp(policy, policy->related_cpus, opp);
	return 0;
}

/*
 * The core traces the change, counts it in the policy's statistics and sets
 * the frequency scale of the CPUs.
 */
static unsigned int lab_fast_switch(struct cpufreq_policy *policy,
				    unsigned int khz)
{
	unsigned int opp = cpufreq_table_find_index_l(policy, khz, false);

	lab_set_opp(policy, policy->related_cpus, opp);
	return policy->freq_table[opp].frequency;
}

/* The device tree's opp-microwatt of each OPP. */
static int lab_read_power(struct lab_policy *lab,
			  struct cpufreq_frequency_table *table)
{
	struct dev_pm_opp *opp;
	unsigned int i;

	for (i = 0; table[i].frequency != CPUFREQ_TABLE_END; i++) {
		if (i == LAB_OPPS_MAX) {
			dev_err(lab->cpu_dev, "more than %d OPPs\n",
				LAB_OPPS_MAX);
			return -E2BIG;
		}
		opp = dev_pm_opp_find_freq_exact(lab->cpu_dev,
						 table[i].frequency * 1000UL,
						 true);
		if (IS_ERR(opp))
			return PTR_ERR(opp);
		lab->power_uw[i] = dev_pm_opp_get_power(opp);
		dev_pm_opp_put(opp);
		if (!(table[i].flags & CPUFREQ_BOOST_FREQ))
			lab->top = i;
		if (!lab->power_uw[i]) {
			dev_err(lab->cpu_dev,
				"OPP of %u kHz needs opp-microvolt and opp-microwatt\n",
				table[i].frequency);
			return -EINVAL;
		}
	}
	lab->opps = i;
	return 0;
}

/* Read the device tree's OPP table of policy->cpu and its sharing CPUs. */
static int lab_read_opps(struct cpufreq_policy *policy, struct lab_policy *lab)
{
	int ret;

	ret = dev_pm_opp_of_get_sharing_cpus(lab->cpu_dev, policy->cpus);
	if (ret) {
		dev_err(lab->cpu_dev, "no operating-points-v2: %d\n", ret);
		return ret;
	}
	ret = dev_pm_opp_of_cpumask_add_table(policy->cpus);
	if (ret) {
		dev_err(lab->cpu_dev, "OPP table not usable: %d\n", ret);
		return ret;
	}
	ret = dev_pm_opp_init_cpufreq_table(lab->cpu_dev, &policy->freq_table);
	if (ret)
		goto remove_table;
	ret = lab_read_power(lab, policy->freq_table);
	if (ret)
		goto free_cpufreq_table;
	return 0;

free_cpufreq_table:
	dev_pm_opp_free_cpufreq_table(lab->cpu_dev, &policy->freq_table);
remove_table:
	dev_pm_opp_of_cpumask_remove_table(policy->cpus);
	return ret;
}

static int lab_init(struct cpufreq_policy *policy)
{
	struct lab_policy *lab;
	unsigned int latency;
	int ret;

	lab = kzalloc_obj(*lab);
	if (!lab)
		return -ENOMEM;
	lab->cpu_dev = get_cpu_device(policy->cpu);
	ret = lab->cpu_dev ? lab_read_opps(policy, lab) : -ENODEV;
	if (ret) {
		kfree(lab);
		return ret;
	}

	latency = dev_pm_opp_get_max_transition_latency(lab->cpu_dev);
	policy->cpuinfo.transition_latency = latency ?: LAB_LATENCY_NS;
	policy->transition_delay_us = transition_delay_us;
	policy->dvfs_possible_from_any_cpu = true;
	policy->fast_switch_possible = true;
	policy->driver_data = lab;
	/* As firmware leaves it. policy->cpus still has the offline CPUs. */
	lab_speed_set_range(policy->cpus, policy->freq_table[lab->top].frequency,
			    policy->freq_table[lab->opps - 1].frequency);
	lab_set_opp(policy, policy->cpus, lab->top);
	return 0;
}

static void lab_exit(struct cpufreq_policy *policy)
{
	struct lab_policy *lab = policy->driver_data;
	unsigned int cpu;

	/* Full speed again, for the model and for the scheduler. */
	lab_speed_set_freq(policy->related_cpus,
			   policy->freq_table[lab->top].frequency);
	for_each_cpu(cpu, policy->related_cpus)
		per_cpu(arch_freq_scale, cpu) = SCHED_CAPACITY_SCALE;
	dev_pm_opp_free_cpufreq_table(lab->cpu_dev, &policy->freq_table);
	dev_pm_opp_of_cpumask_remove_table(policy->related_cpus);
	kfree(lab);
}

/* Keep the policy while its CPUs are offline: its OPP and counters stay. */
static int lab_online(struct cpufreq_policy *policy)
{
	return 0;
}

static int lab_offline(struct cpufreq_policy *policy)
{
	return 0;
}

#ifndef LAB_OLD_KERNEL
/*
 * As cpufreq_boost_set_sw(), which only raises the maximum: boost could not be
 * switched off again. The core turns the maximum into a limit.
 */
static int lab_set_boost(struct cpufreq_policy *policy, int state)
{
	struct lab_policy *lab = policy->driver_data;
	unsigned int opp = state ? lab->opps - 1 : lab->top;

	policy->cpuinfo.max_freq = policy->freq_table[opp].frequency;
	return 0;
}
#endif

static u64 lab_policy_busy_ns(const struct cpufreq_policy *policy, unsigned int opp)
{
	unsigned int cpu;
	u64 ns = 0;

	for_each_cpu(cpu, policy->related_cpus)
		ns += lab_energy_busy_ns(cpu, opp);
	return ns;
}

static ssize_t show_lab_energy_uj(struct cpufreq_policy *policy, char *buf)
{
	struct lab_policy *lab = policy->driver_data;
	unsigned int opp;
	u64 uj = 0;

	/* uW * ns is 1e-15 J */
	for (opp = 0; opp < lab->opps; opp++)
		uj += mul_u64_u64_div_u64(lab_policy_busy_ns(policy, opp),
					  lab->power_uw[opp], NSEC_PER_SEC);
	return sysfs_emit(buf, "%llu\n", uj);
}

static ssize_t show_lab_busy_ns(struct cpufreq_policy *policy, char *buf)
{
	struct lab_policy *lab = policy->driver_data;
	unsigned int opp;
	ssize_t len = 0;

	for (opp = 0; opp < lab->opps; opp++)
		len += sysfs_emit_at(buf, len, "%u %u %llu\n",
				     policy->freq_table[opp].frequency,
				     lab->power_uw[opp],
				     lab_policy_busy_ns(policy, opp));
	return len;
}

cpufreq_freq_attr_ro(lab_energy_uj);
cpufreq_freq_attr_ro(lab_busy_ns);

static struct freq_attr *lab_attrs[] = {
#ifdef LAB_OLD_KERNEL	/* later ones add it by themselves */
	&cpufreq_freq_attr_scaling_available_freqs,
#endif
	&lab_energy_uj,
	&lab_busy_ns,
	NULL,
};

static struct cpufreq_driver lab_driver = {
	.name		= "lab-cpufreq",
	.flags		= CPUFREQ_HAVE_GOVERNOR_PER_POLICY,
	.init		= lab_init,
	.exit		= lab_exit,
	.online		= lab_online,
	.offline	= lab_offline,
	.verify		= cpufreq_generic_frequency_table_verify,
	.get		= lab_get,
	.target_index	= lab_target_index,
	.fast_switch	= lab_fast_switch,
	.register_em	= cpufreq_register_em_with_opp,
	.attr		= lab_attrs,
};

/* Only a board with boost has a switch for it. */
static void __init lab_boost_init(void)
{
#ifndef LAB_OLD_KERNEL	/* there the driver has to set the limit, too */
	struct device_node *turbo = of_find_node_with_property(NULL, "turbo-mode");

	if (turbo)
		lab_driver.set_boost = lab_set_boost;
	of_node_put(turbo);
#endif
}

static int __init lab_module_init(void)
{
	int ret;

	lab_boost_init();
	ret = lab_energy_init();
	if (ret)
		return ret;
	ret = cpufreq_register_driver(&lab_driver);
	if (ret) {
		pr_err("cannot register: %d\n", ret);
		goto energy;
	}
	ret = lab_speed_init();
	if (ret) {
		pr_err("cannot switch on the speed model: %d\n", ret);
		goto driver;
	}
	return 0;

driver:
	cpufreq_unregister_driver(&lab_driver);
energy:
	lab_energy_exit();
	return ret;
}
module_init(lab_module_init);

static void __exit lab_module_exit(void)
{
	lab_speed_exit();
	cpufreq_unregister_driver(&lab_driver);
	lab_energy_exit();
}
module_exit(lab_module_exit);

MODULE_DESCRIPTION("cpufreq driver of an emulated host: OPPs, energy, speed");
MODULE_LICENSE("GPL");
