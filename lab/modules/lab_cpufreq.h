/* SPDX-License-Identifier: GPL-2.0-only */
/* What the parts of lab_cpufreq know of each other. */
#ifndef LAB_CPUFREQ_H
#define LAB_CPUFREQ_H

#include <linux/cpumask_types.h>
#include <linux/types.h>

struct cpufreq_policy;

/* OPPs of a policy at most. */
#define LAB_OPPS_MAX	32

/*
 * Board: what the machine's clocks are, by its device tree, or on a PC by the
 * module's parameters.
 *
 * lab_board_read() sets the CPUs, the frequency table and the transition
 * latency of a new policy, and the power of one busy CPU at each OPP in uW.
 * lab_board_free() undoes that. lab_board_set_freq() lets the scheduler know
 * that @cpus run at @khz from now on, @khz_top being their highest frequency
 * without boost; any context.
 */
int lab_board_init(void);
void lab_board_exit(void);
bool lab_board_has_boost(void);
int lab_board_read(struct cpufreq_policy *policy, u32 *power_uw);
void lab_board_free(struct cpufreq_policy *policy);
void lab_board_register_em(struct cpufreq_policy *policy);
void lab_board_set_freq(const struct cpumask *cpus, unsigned int khz,
			unsigned int khz_top);

/*
 * Energy: how long each CPU was busy at each OPP.
 *
 * lab_energy_set_opp() sets the OPP number @opp that @cpus run at from now on.
 * Any context. lab_energy_busy_ns() is a CPU's busy time at an OPP, in ns,
 * since the module was loaded.
 */
int lab_energy_init(void);
void lab_energy_exit(void);
void lab_energy_set_opp(const struct cpumask *cpus, unsigned int opp);
u64 lab_energy_busy_ns(unsigned int cpu, unsigned int opp);

/*
 * Speed: the share of time that a CPU at its frequency does not deliver.
 *
 * lab_speed_set_range() says that @cpus have their capacity at @khz_ref, and run
 * at up to @khz_top, which is more with boost. lab_speed_set_freq() makes @cpus
 * run at @khz from now on. Any context, whether the model is on or off.
 */
#ifndef LAB_SPEED_MODEL
static inline int lab_speed_init(void)
{
	return 0;
}

static inline void lab_speed_exit(void)
{
}

static inline void lab_speed_set_range(const struct cpumask *cpus,
				       unsigned int khz_ref,
				       unsigned int khz_top)
{
}

static inline void lab_speed_set_freq(const struct cpumask *cpus,
				      unsigned int khz)
{
}
#else
int lab_speed_init(void);
void lab_speed_exit(void);
void lab_speed_set_range(const struct cpumask *cpus, unsigned int khz_ref,
			 unsigned int khz_top);
void lab_speed_set_freq(const struct cpumask *cpus, unsigned int khz);
#endif

#endif
