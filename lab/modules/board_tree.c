// SPDX-License-Identifier: GPL-2.0-only
/*
 * A board with a device tree: operating-points-v2 of each CPU, shared by the
 * CPUs of a policy, with power and boost.
 */
#include <linux/cpu.h>
#include <linux/cpufreq.h>
#include <linux/of.h>
#include <linux/pm_opp.h>

#include "lab_cpufreq.h"

/* Without clock-latency-ns in the OPPs: a round figure for a firmware clock. */
#define LAB_LATENCY_NS	(50 * NSEC_PER_USEC)

/* The device tree's opp-microwatt of each OPP. */
static int lab_read_power(struct device *cpu_dev,
			  const struct cpufreq_frequency_table *table,
			  u32 *power_uw)
{
	struct dev_pm_opp *opp;
	unsigned int i;

	for (i = 0; table[i].frequency != CPUFREQ_TABLE_END; i++) {
		if (i == LAB_OPPS_MAX) {
			dev_err(cpu_dev, "more than %d OPPs\n", LAB_OPPS_MAX);
			return -E2BIG;
		}
		opp = dev_pm_opp_find_freq_exact(cpu_dev,
						 table[i].frequency * 1000UL,
						 true);
		if (IS_ERR(opp))
			return PTR_ERR(opp);
		power_uw[i] = dev_pm_opp_get_power(opp);
		dev_pm_opp_put(opp);
		if (!power_uw[i]) {
			dev_err(cpu_dev,
				"OPP of %u kHz needs opp-microvolt and opp-microwatt\n",
				table[i].frequency);
			return -EINVAL;
		}
	}
	return 0;
}

/* The device tree's OPP table of policy->cpu and its sharing CPUs. */
int lab_board_read(struct cpufreq_policy *policy, u32 *power_uw)
{
	struct device *cpu_dev = get_cpu_device(policy->cpu);
	unsigned int latency;
	int ret;

	if (!cpu_dev)
		return -ENODEV;
	ret = dev_pm_opp_of_get_sharing_cpus(cpu_dev, policy->cpus);
	if (ret) {
		dev_err(cpu_dev, "no operating-points-v2: %d\n", ret);
		return ret;
	}
	ret = dev_pm_opp_of_cpumask_add_table(policy->cpus);
	if (ret) {
		dev_err(cpu_dev, "OPP table not usable: %d\n", ret);
		return ret;
	}
	ret = dev_pm_opp_init_cpufreq_table(cpu_dev, &policy->freq_table);
	if (ret)
		goto remove_table;
	ret = lab_read_power(cpu_dev, policy->freq_table, power_uw);
	if (ret)
		goto free_cpufreq_table;
	latency = dev_pm_opp_get_max_transition_latency(cpu_dev);
	policy->cpuinfo.transition_latency = latency ?: LAB_LATENCY_NS;
	return 0;

free_cpufreq_table:
	dev_pm_opp_free_cpufreq_table(cpu_dev, &policy->freq_table);
remove_table:
	dev_pm_opp_of_cpumask_remove_table(policy->cpus);
	return ret;
}

void lab_board_free(struct cpufreq_policy *policy)
{
	struct device *cpu_dev = get_cpu_device(policy->cpu);

	dev_pm_opp_free_cpufreq_table(cpu_dev, &policy->freq_table);
	dev_pm_opp_of_cpumask_remove_table(policy->related_cpus);
}

void lab_board_register_em(struct cpufreq_policy *policy)
{
	cpufreq_register_em_with_opp(policy);
}

/* The core sets the frequency scale of the CPUs itself. */
void lab_board_set_freq(const struct cpumask *cpus, unsigned int khz,
			unsigned int khz_top)
{
}

bool lab_board_has_boost(void)
{
	struct device_node *turbo = of_find_node_with_property(NULL, "turbo-mode");

	of_node_put(turbo);
	return turbo;
}

int lab_board_init(void)
{
	return 0;
}

void lab_board_exit(void)
{
}
