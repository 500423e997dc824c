// SPDX-License-Identifier: GPL-2.0-only
/*
 * cpufreq driver of the lab's emulated host.
 *
 * The machine has no clock to set: this driver only remembers the OPP, and tells
 * the board, the energy counter and the speed model. Everything else is as a
 * real driver has it: fast switch, updates from any CPU, a governor per policy,
 * an energy model. OPPs, sharing and power are the board's.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cpu.h>
#include <linux/cpufreq.h>
#include <linux/math64.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "lab_cpufreq.h"

static unsigned int transition_delay_us = 1000;
module_param(transition_delay_us, uint, 0444);
MODULE_PARM_DESC(transition_delay_us,
		 "schedutil's shortest time between two changes of a policy, in us");

/**
 * struct lab_policy - what the driver keeps for a policy
 * @opp: index of the OPP in force
 * @opps: number of OPPs, lowest first
 * @top: index of the highest OPP that is not for boost
 * @power_uw: power of one busy CPU at each OPP, in uW
 */
struct lab_policy {
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
	lab_board_set_freq(cpus, policy->freq_table[opp].frequency,
			   policy->freq_table[lab->top].frequency);
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

/* How many OPPs the board's table has, and which of them is the highest without boost. */
static void lab_count_opps(struct lab_policy *lab,
			   const struct cpufreq_frequency_table *table)
{
	unsigned int i;

	for (i = 0; table[i].frequency != CPUFREQ_TABLE_END; i++)
		if (!(table[i].flags & CPUFREQ_BOOST_FREQ))
			lab->top = i;
	lab->opps = i;
}

static int lab_init(struct cpufreq_policy *policy)
{
	struct lab_policy *lab;
	int ret;

	lab = kzalloc_obj(*lab);
	if (!lab)
		return -ENOMEM;
	ret = lab_board_read(policy, lab->power_uw);
	if (ret) {
		kfree(lab);
		return ret;
	}
	lab_count_opps(lab, policy->freq_table);

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
	lab_board_free(policy);
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
	.register_em	= lab_board_register_em,
	.attr		= lab_attrs,
};

/* Only a board with boost has a switch for it. */
static void __init lab_boost_init(void)
{
#ifndef LAB_OLD_KERNEL	/* there the driver has to set the limit, too */
	if (lab_board_has_boost())
		lab_driver.set_boost = lab_set_boost;
#endif
}

static int __init lab_module_init(void)
{
	int ret;

	ret = lab_board_init();
	if (ret)
		return ret;
	lab_boost_init();
	ret = lab_energy_init();
	if (ret)
		goto board;
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
board:
	lab_board_exit();
	return ret;
}
module_init(lab_module_init);

static void __exit lab_module_exit(void)
{
	lab_speed_exit();
	cpufreq_unregister_driver(&lab_driver);
	lab_energy_exit();
	lab_board_exit();
}
module_exit(lab_module_exit);

MODULE_DESCRIPTION("cpufreq driver of an emulated host: OPPs, energy, speed");
MODULE_LICENSE("GPL");
