// SPDX-License-Identifier: GPL-2.0-only
/*
 * Busy time of each CPU at each OPP, from which energy follows.
 *
 * Busy is whatever is not inside an idle state, as the cpu_idle trace event
 * tells it: tasks, interrupts, the idle loop's own work, and a KVM guest. Idle
 * and offline CPUs cost nothing in this model.
 */
#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/percpu.h>
#include <linux/sched/clock.h>
#include <linux/spinlock.h>
#include <trace/events/power.h>

#include "lab_cpufreq.h"

/**
 * struct lab_energy - a CPU's account
 * @lock: for the rest; a change of frequency comes from any CPU
 * @since_ns: up to when @busy_ns is right
 * @opp: the OPP in force
 * @busy: the CPU is online and not inside an idle state
 * @busy_ns: busy time at each OPP
 */
struct lab_energy {
	raw_spinlock_t lock;
	u64 since_ns;
	unsigned int opp;
	bool busy;
	u64 busy_ns[LAB_OPPS_MAX];
};

static DEFINE_PER_CPU(struct lab_energy, lab_energy) = {
	.lock = __RAW_SPIN_LOCK_UNLOCKED(lab_energy.lock),
};

static int lab_energy_state;

static void lab_energy_settle(struct lab_energy *energy)
{
	u64 now = local_clock();

	if (energy->busy)
		energy->busy_ns[energy->opp] += now - energy->since_ns;
	energy->since_ns = now;
}

static void lab_energy_set_busy(unsigned int cpu, bool busy)
{
	struct lab_energy *energy = per_cpu_ptr(&lab_energy, cpu);

	guard(raw_spinlock_irqsave)(&energy->lock);
	lab_energy_settle(energy);
	energy->busy = busy;
}

void lab_energy_set_opp(const struct cpumask *cpus, unsigned int opp)
{
	unsigned int cpu;

	for_each_cpu(cpu, cpus) {
		struct lab_energy *energy = per_cpu_ptr(&lab_energy, cpu);

		guard(raw_spinlock_irqsave)(&energy->lock);
		lab_energy_settle(energy);
		energy->opp = opp;
	}
}

u64 lab_energy_busy_ns(unsigned int cpu, unsigned int opp)
{
	struct lab_energy *energy = per_cpu_ptr(&lab_energy, cpu);

	guard(raw_spinlock_irqsave)(&energy->lock);
	lab_energy_settle(energy);
	return energy->busy_ns[opp];
}

static void lab_energy_idle(void *data, unsigned int state, unsigned int cpu)
{
	lab_energy_set_busy(cpu, state == PWR_EVENT_EXIT);
}

/* Runs on the CPU itself, which is therefore busy. */
static int lab_energy_online(unsigned int cpu)
{
	lab_energy_set_busy(cpu, true);
	return 0;
}

static int lab_energy_offline(unsigned int cpu)
{
	lab_energy_set_busy(cpu, false);
	return 0;
}

int lab_energy_init(void)
{
	int ret;

	ret = register_trace_cpu_idle(lab_energy_idle, NULL);
	if (ret)
		return ret;
	ret = cpuhp_setup_state(CPUHP_AP_ONLINE_DYN, "lab/energy:online",
				lab_energy_online, lab_energy_offline);
	if (ret < 0) {
		unregister_trace_cpu_idle(lab_energy_idle, NULL);
		tracepoint_synchronize_unregister();
		return ret;
	}
	lab_energy_state = ret;
	return 0;
}

void lab_energy_exit(void)
{
	cpuhp_remove_state(lab_energy_state);
	unregister_trace_cpu_idle(lab_energy_idle, NULL);
	tracepoint_synchronize_unregister();
}
