// SPDX-License-Identifier: GPL-2.0-only
/*
 * A PC, which has no device tree: its clocks are the module's parameter.
 *
 * The emulated CPU has neither APERF and MPERF nor an Intel CPU's capacities,
 * from which an x86 kernel learns speed and size of a CPU. Schedutil follows a
 * clamp by them alone. So this file sets what they would have: the kernel's
 * switch for frequency invariance, each CPU's frequency scale, and on a hybrid
 * machine the capacities, by the calls of intel_pstate. Modules can't call
 * those: kallsyms has their addresses.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cpu.h>
#include <linux/cpufreq.h>
#include <linux/energy_model.h>
#include <linux/jump_label.h>
#include <linux/kprobes.h>
#include <linux/math64.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/topology.h>

#include "lab_cpufreq.h"

/* As many as the lab's largest topology has CPUs. */
#define LAB_POLICIES_MAX	20
/* A round figure for a machine-specific register. */
#define LAB_LATENCY_NS	(20 * NSEC_PER_USEC)

static char *policies = "";
module_param(policies, charp, 0444);
MODULE_PARM_DESC(policies,
		 "CPUS/CAPACITY/KHZ:MICROWATT[:b]/...;... b: for boost");

/**
 * struct lab_clock - what the parameter tells of a policy
 * @cpus: its CPUs
 * @capacity: of each, at the highest frequency without boost
 * @opps: number of OPPs, lowest first
 * @table: their frequencies, ended
 * @power_uw: power of one busy CPU at each OPP, in uW
 */
struct lab_clock {
	struct cpumask cpus;
	unsigned long capacity;
	unsigned int opps;
	struct cpufreq_frequency_table table[LAB_OPPS_MAX + 1];
	u32 power_uw[LAB_OPPS_MAX];
};

static struct lab_clock *lab_clocks;
static unsigned int lab_clock_count;
static bool lab_boost;

/* KHZ:MICROWATT or KHZ:MICROWATT:b */
static int lab_parse_opp(struct lab_clock *clock, char *text)
{
	char *khz = strsep(&text, ":"), *uw = strsep(&text, ":");
	struct cpufreq_frequency_table *entry = &clock->table[clock->opps];
	int ret;

	if (clock->opps == LAB_OPPS_MAX)
		return -E2BIG;
	if (!uw || (text && strcmp(text, "b")))
		return -EINVAL;
	ret = kstrtouint(khz, 10, &entry->frequency);
	if (ret)
		return ret;
	ret = kstrtou32(uw, 10, &clock->power_uw[clock->opps]);
	if (ret)
		return ret;
	if (text) {
		entry->flags = CPUFREQ_BOOST_FREQ;
		lab_boost = true;
	}
	clock->opps++;
	return 0;
}

static int lab_parse_clock(struct lab_clock *clock, char *text)
{
	char *cpus = strsep(&text, "/"), *capacity = strsep(&text, "/");
	char *opp;
	int ret;

	if (!text)
		return -EINVAL;
	ret = cpulist_parse(cpus, &clock->cpus);
	if (ret)
		return ret;
	ret = kstrtoul(capacity, 10, &clock->capacity);
	if (ret)
		return ret;
	while ((opp = strsep(&text, "/"))) {
		ret = lab_parse_opp(clock, opp);
		if (ret)
			return ret;
	}
	clock->table[clock->opps].frequency = CPUFREQ_TABLE_END;
	return 0;
}

static int lab_parse(void)
{
	char *copy __free(kfree) = kstrdup(policies, GFP_KERNEL);
	char *rest = copy, *policy;
	int ret;

	if (!copy)
		return -ENOMEM;
	while ((policy = strsep(&rest, ";"))) {
		if (lab_clock_count == LAB_POLICIES_MAX)
			return -E2BIG;
		ret = lab_parse_clock(&lab_clocks[lab_clock_count], policy);
		if (ret) {
			pr_err("policy %u of the parameter: %d\n",
			       lab_clock_count, ret);
			return ret;
		}
		lab_clock_count++;
	}
	return 0;
}

static struct lab_clock *lab_clock_of(unsigned int cpu)
{
	unsigned int i;

	for (i = 0; i < lab_clock_count; i++)
		if (cpumask_test_cpu(cpu, &lab_clocks[i].cpus))
			return &lab_clocks[i];
	return NULL;
}

int lab_board_read(struct cpufreq_policy *policy, u32 *power_uw)
{
	struct lab_clock *clock = lab_clock_of(policy->cpu);

	if (!clock)
		return -ENODEV;
	cpumask_copy(policy->cpus, &clock->cpus);
	policy->freq_table = clock->table;
	policy->cpuinfo.transition_latency = LAB_LATENCY_NS;
	memcpy(power_uw, clock->power_uw, sizeof(clock->power_uw));
	return 0;
}

/* The table is the module's. */
void lab_board_free(struct cpufreq_policy *policy)
{
}

/* The lowest OPP of at least *khz, and its power. */
static int lab_active_power(struct device *dev, unsigned long *uw,
			    unsigned long *khz)
{
	const struct lab_clock *clock = lab_clock_of(dev->id);
	unsigned int i;

	if (!clock)
		return -ENODEV;
	for (i = 0; i < clock->opps; i++) {
		if (clock->table[i].frequency < *khz)
			continue;
		*khz = clock->table[i].frequency;
		*uw = clock->power_uw[i];
		return 0;
	}
	return -EINVAL;
}

void lab_board_register_em(struct cpufreq_policy *policy)
{
	static const struct em_data_callback cb = EM_DATA_CB(lab_active_power);
	const struct lab_clock *clock = lab_clock_of(policy->cpu);
	int ret;

	ret = em_dev_register_perf_domain(get_cpu_device(policy->cpu),
					  clock->opps, &cb, policy->cpus, true);
	if (ret)
		pr_warn("no energy model of CPU %u: %d\n", policy->cpu, ret);
}

/* What APERF and MPERF would show at the next tick. */
void lab_board_set_freq(const struct cpumask *cpus, unsigned int khz,
			unsigned int khz_top)
{
	u64 scale = div_u64((u64)khz << SCHED_CAPACITY_SHIFT, khz_top);
	unsigned int cpu;

	scale = min(scale, SCHED_CAPACITY_SCALE);
	for_each_cpu(cpu, cpus)
		WRITE_ONCE(per_cpu(arch_freq_scale, cpu), scale);
}

bool lab_board_has_boost(void)
{
	return lab_boost;
}

typedef unsigned long (*lab_lookup_fn)(const char *name);
typedef bool (*lab_enable_fn)(void);
typedef void (*lab_capacity_fn)(int cpu, unsigned long cap,
				unsigned long max_cap, unsigned long cap_freq,
				unsigned long base_freq);

/* The lookup itself isn't exported: a probe, which is never hit, finds it. */
static lab_lookup_fn lab_find_lookup(void)
{
	struct kprobe probe = { .symbol_name = "kallsyms_lookup_name" };

	if (register_kprobe(&probe))
		return NULL;
	unregister_kprobe(&probe);
	return (lab_lookup_fn)probe.addr;
}

/* As intel_pstate does on a hybrid machine. */
static int lab_set_capacities(lab_lookup_fn lookup)
{
	lab_capacity_fn set = (lab_capacity_fn)lookup("arch_set_cpu_capacity");
	lab_enable_fn enable =
		(lab_enable_fn)lookup("arch_enable_hybrid_capacity_scale");
	unsigned int cpu, i;

	if (!set || !enable)
		return -ENOENT;
	if (!enable())
		return -ENOMEM;
	for (i = 0; i < lab_clock_count; i++) {
		for_each_cpu(cpu, &lab_clocks[i].cpus) {
			set(cpu, lab_clocks[i].capacity, SCHED_CAPACITY_SCALE,
			    1, 1);
			/* sysfs shows this one. */
			WRITE_ONCE(per_cpu(cpu_scale, cpu),
				   lab_clocks[i].capacity);
		}
	}
	return 0;
}

static struct static_key *lab_invariance;

static int lab_board_scale(void)
{
	lab_lookup_fn lookup = lab_find_lookup();
	unsigned int i;
	int ret;

	if (lookup)
		lab_invariance = (struct static_key *)lookup("arch_scale_freq_key");
	if (!lab_invariance)
		return -ENOENT;
	for (i = 0; i < lab_clock_count; i++) {
		if (lab_clocks[i].capacity == SCHED_CAPACITY_SCALE)
			continue;
		ret = lab_set_capacities(lookup);
		if (ret)
			return ret;
		break;
	}
	static_key_enable(lab_invariance);
	return 0;
}

int lab_board_init(void)
{
	int ret;

	lab_clocks = kcalloc(LAB_POLICIES_MAX, sizeof(*lab_clocks), GFP_KERNEL);
	if (!lab_clocks)
		return -ENOMEM;
	ret = lab_parse();
	if (!ret)
		ret = lab_board_scale();
	if (ret)
		kfree(lab_clocks);
	return ret;
}

void lab_board_exit(void)
{
	static_key_disable(lab_invariance);
	kfree(lab_clocks);
}
