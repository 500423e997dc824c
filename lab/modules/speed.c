// SPDX-License-Identifier: GPL-2.0-only
/*
 * Speed follows frequency: a CPU delivers capacity / 1024 * f / f_ref of the
 * time that it is busy, and spins the rest away. Boost goes beyond f_ref: then
 * it is that share of what the fastest CPU delivers at its highest frequency.
 *
 * Work done puts a CPU into debt: w ns of work at a share s of full speed
 * should have taken w / s, so w * (1 - s) / s are owed. A pinned hrtimer in
 * hard-interrupt context pays by spinning; how long is measured, so errors
 * don't add up. What the timer and the tick cost is no work and is taken off
 * the debt. An idle CPU has no timer and never spins: what it owes when it goes
 * idle is paid by its next work.
 *
 * IRQ_TIME_ACCOUNTING is off in the lab's kernels, so the scheduler sees the
 * spun time as the running task's, as it would on a slow CPU. A guest's time
 * is spun away too: the interrupt makes it exit.
 */
#include <linux/arch_topology.h>
#include <linux/atomic.h>
#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/hrtimer.h>
#include <linux/math64.h>
#include <linux/module.h>
#include <linux/percpu.h>
#include <linux/sched.h>
#include <linux/sched/clock.h>
#include <linux/spinlock.h>
#include <trace/events/sched.h>

#include "lab_cpufreq.h"
#include "lab_spin.h"

/* A share of full speed is a fixed-point number with this many bits. */
#define LAB_SHARE_BITS	20
#define LAB_SHARE_ONE	BIT_ULL(LAB_SHARE_BITS)

/*
 * Spinning at a time: by as much the end of a short burst can be off. More
 * where the CPU would do less than LAB_WORK_NS in between, so that what the
 * interrupt costs stays small beside it.
 */
#define LAB_SPIN_NS	(300 * NSEC_PER_USEC)
#define LAB_WORK_NS	(100 * NSEC_PER_USEC)

/* Work between two looks at most: at full speed nothing is owed. */
#define LAB_WORK_MAX_NS	(2 * NSEC_PER_MSEC)

/*
 * Work between two spins at least, so that a CPU in debt makes progress; and
 * spinning at a time at most, so that other interrupts come through.
 */
#define LAB_WORK_MIN_NS	(50 * NSEC_PER_USEC)
#define LAB_SPIN_MAX_NS	(4 * NSEC_PER_MSEC)

/* Spinning between two offers to run another CPU, while none has work. */
#define LAB_SPIN_STEP_NS	(2 * NSEC_PER_USEC)

/**
 * struct lab_speed - a CPU's account
 * @lock: for all but the timer; a change of frequency comes from any CPU
 * @timer: fires when the next share is to be spun away
 * @since_ns: up to when @debt_ns is right
 * @debt_ns: time to spin away; negative when too much was
 * @spun_ns: when the last spin began, or work after idling
 * @khz: frequency in force
 * @khz_ref: frequency at which the CPU has its capacity
 * @khz_top: its highest frequency
 * @on: the model is on and the CPU is online
 * @working: a task other than idle runs, and the timer isn't spinning
 */
struct lab_speed {
	raw_spinlock_t lock;
	struct hrtimer timer;
	u64 since_ns;
	s64 debt_ns;
	u64 spun_ns;
	unsigned int khz;
	unsigned int khz_ref;
	unsigned int khz_top;
	bool on;
	bool working;
};

static DEFINE_PER_CPU(struct lab_speed, lab_speed) = {
	.lock = __RAW_SPIN_LOCK_UNLOCKED(lab_speed.lock),
	.khz = 1,
	.khz_ref = 1,
	.khz_top = 1,
};

/* Capacity of the fastest CPU at its highest frequency: above 1024 with boost. */
static u64 lab_speed_full = SCHED_CAPACITY_SCALE;

/* How many CPUs are working. */
static atomic_t lab_speed_workers;

/*
 * Found by measuring: with these, fixed work takes times inverse to speed. A
 * tick of an RT kernel costs several times that of a standard one.
 */
static unsigned int speed_timer_ns = 3000;
module_param(speed_timer_ns, uint, 0644);
MODULE_PARM_DESC(speed_timer_ns,
		 "what the model's timer costs, without the spinning, in ns");

static unsigned int speed_tick_ns =
	IS_ENABLED(CONFIG_PREEMPT_RT) ? 34000 : 8000;
module_param(speed_tick_ns, uint, 0644);
MODULE_PARM_DESC(speed_tick_ns, "what a tick costs, in ns");

/* Leaving a KVM guest and entering it again; and the tick that it has too. */
static unsigned int speed_guest_timer_ns = 2500;
module_param(speed_guest_timer_ns, uint, 0644);
MODULE_PARM_DESC(speed_guest_timer_ns,
		 "what the timer costs more while a KVM guest runs, in ns");

static unsigned int speed_guest_tick_ns =
	IS_ENABLED(CONFIG_PREEMPT_RT) ? 0 : 14000;
module_param(speed_guest_tick_ns, uint, 0644);
MODULE_PARM_DESC(speed_guest_tick_ns,
		 "what a guest's tick and leaving it for the host's cost, in ns");

static u64 lab_speed_share(unsigned int cpu, const struct lab_speed *speed)
{
	u64 capacity = arch_scale_cpu_capacity(cpu);
	u64 share;

	/* 1024 * 5 GHz in kHz * 2^20 is below 2^53 */
	share = div64_u64((capacity * speed->khz) << LAB_SHARE_BITS,
			  lab_speed_full * speed->khz_ref);
	/* lab_speed_full is rounded down. */
	return min(share, LAB_SHARE_ONE);
}

/*
 * Put what a working CPU did since the last time into its debt. @overhead_ns
 * of it was no work.
 */
static void lab_speed_settle(unsigned int cpu, struct lab_speed *speed,
			     u64 overhead_ns)
{
	u64 share = max(lab_speed_share(cpu, speed), 1ULL);
	u64 now = local_clock();
	u64 work = now - speed->since_ns;

	overhead_ns = min(overhead_ns, work);
	work -= overhead_ns;
	speed->debt_ns += div64_u64(work * (LAB_SHARE_ONE - share), share);
	speed->debt_ns -= overhead_ns;
	/* At full speed the overhead can't be made up for: don't save it. */
	if (share == LAB_SHARE_ONE)
		speed->debt_ns = max(speed->debt_ns, 0LL);
	speed->since_ns = now;
}

static void lab_speed_set_working(struct lab_speed *speed, bool working)
{
	speed->working = working;
	if (working)
		atomic_inc(&lab_speed_workers);
	else
		atomic_dec(&lab_speed_workers);
}

/*
 * What interrupts cost in the work that this one ends, and the spinning before
 * it, by what it interrupted.
 */
static u64 lab_speed_overhead_ns(const struct lab_speed *speed)
{
	u64 ticks = speed_tick_ns, timer = speed_timer_ns;

	if (current->flags & PF_VCPU) {
		ticks += speed_guest_tick_ns;
		timer += speed_guest_timer_ns;
	}
	/* Below 2^16 ns a tick, and some ms */
	return timer + div_u64(ticks * (local_clock() - speed->spun_ns),
			       TICK_NSEC);
}

/* How long to work until there is enough debt for a spin. */
static u64 lab_speed_work_ns(unsigned int cpu, const struct lab_speed *speed)
{
	u64 share = max(lab_speed_share(cpu, speed), 1ULL);
	u64 rest = LAB_SHARE_ONE - share;
	s64 room;

	if (!rest)
		return LAB_WORK_MAX_NS;
	room = max(LAB_SPIN_NS, div64_u64(LAB_WORK_NS * rest, share));
	room -= speed->debt_ns;
	if (room <= 0)
		return LAB_WORK_MIN_NS;
	return clamp(div64_u64(room * share, rest), LAB_WORK_MIN_NS,
		     LAB_WORK_MAX_NS);
}

/*
 * The emulator takes cpu_relax() as leave to run another CPU, so a CPU that
 * spins costs the working ones little. It may come back late from it; that is
 * measured, and is credit then.
 */
static void lab_speed_spin(u64 ns)
{
	u64 end = local_clock() + ns;
	s64 left;

	while ((left = end - local_clock()) > 0) {
		if (!atomic_read(&lab_speed_workers))
			lab_spin_ns(min_t(u64, left, LAB_SPIN_STEP_NS));
		cpu_relax();
	}
}

static enum hrtimer_restart lab_speed_tick(struct hrtimer *timer)
{
	struct lab_speed *speed = container_of(timer, struct lab_speed, timer);
	unsigned int cpu = smp_processor_id();
	u64 start, work;
	s64 debt;

	scoped_guard(raw_spinlock, &speed->lock) {
		if (!speed->working)
			return HRTIMER_NORESTART;
		lab_speed_settle(cpu, speed, lab_speed_overhead_ns(speed));
		lab_speed_set_working(speed, false);
		start = speed->since_ns;
		speed->spun_ns = start;
		debt = speed->debt_ns;
	}
	/* Unlocked: a change of frequency elsewhere must not wait for this. */
	if (debt > 0)
		lab_speed_spin(min_t(u64, debt, LAB_SPIN_MAX_NS));
	scoped_guard(raw_spinlock, &speed->lock) {
		speed->since_ns = local_clock();
		speed->debt_ns -= speed->since_ns - start;
		lab_speed_set_working(speed, true);
		work = lab_speed_work_ns(cpu, speed);
	}
	hrtimer_set_expires(timer, ktime_add_ns(ktime_get(), work));
	return HRTIMER_RESTART;
}

/* This CPU has work from now on. Interrupts are off. */
static void lab_speed_start(struct lab_speed *speed)
{
	u64 work;

	scoped_guard(raw_spinlock, &speed->lock) {
		if (!speed->on || speed->working)
			return;
		speed->since_ns = local_clock();
		speed->spun_ns = speed->since_ns;
		lab_speed_set_working(speed, true);
		work = lab_speed_work_ns(smp_processor_id(), speed);
	}
	hrtimer_start(&speed->timer, ns_to_ktime(work),
		      HRTIMER_MODE_REL_PINNED_HARD);
}

/* This CPU has no work from now on. Interrupts are off. */
static void lab_speed_stop(struct lab_speed *speed)
{
	scoped_guard(raw_spinlock, &speed->lock) {
		if (!speed->working)
			return;
		lab_speed_settle(smp_processor_id(), speed, 0);
		lab_speed_set_working(speed, false);
	}
	/* Its handler runs on this CPU only, so it isn't running. */
	hrtimer_try_to_cancel(&speed->timer);
}

/*
 * The scheduler's way in and out. Idle is left through sched_entry and entered
 * through sched_exit. Both come before the idle governor reads the next timer,
 * so it never sees ours. (sched_switch would do, too, but isn't exported.)
 */
static void lab_speed_sched_entry(void *data, bool preempt)
{
	if (!is_idle_task(current))
		return;
	guard(irqsave)();
	lab_speed_start(this_cpu_ptr(&lab_speed));
}

static void lab_speed_sched_exit(void *data, bool is_switch)
{
	if (!is_idle_task(current))
		return;
	guard(irqsave)();
	lab_speed_stop(this_cpu_ptr(&lab_speed));
}

/* Both run on the CPU itself, in a task. */
static int lab_speed_online(unsigned int cpu)
{
	struct lab_speed *speed = per_cpu_ptr(&lab_speed, cpu);

	hrtimer_setup(&speed->timer, lab_speed_tick, CLOCK_MONOTONIC,
		      HRTIMER_MODE_REL_PINNED_HARD);
	guard(irqsave)();
	speed->debt_ns = 0;
	speed->on = true;
	lab_speed_start(speed);
	return 0;
}

static int lab_speed_offline(unsigned int cpu)
{
	struct lab_speed *speed = per_cpu_ptr(&lab_speed, cpu);

	guard(irqsave)();
	speed->on = false;
	lab_speed_stop(speed);
	return 0;
}

void lab_speed_set_range(const struct cpumask *cpus, unsigned int khz_ref,
			 unsigned int khz_top)
{
	unsigned int cpu;

	for_each_cpu(cpu, cpus) {
		struct lab_speed *speed = per_cpu_ptr(&lab_speed, cpu);

		guard(raw_spinlock_irqsave)(&speed->lock);
		speed->khz_ref = khz_ref;
		speed->khz_top = khz_top;
	}
}

void lab_speed_set_freq(const struct cpumask *cpus, unsigned int khz)
{
	unsigned int cpu;

	for_each_cpu(cpu, cpus) {
		struct lab_speed *speed = per_cpu_ptr(&lab_speed, cpu);

		guard(raw_spinlock_irqsave)(&speed->lock);
		if (speed->working)
			lab_speed_settle(cpu, speed, 0);
		speed->khz = khz;
	}
}

/* All policies are there by now, and with them the capacities. */
static void lab_speed_find_full(void)
{
	unsigned int cpu;
	u64 full = 1;

	for_each_possible_cpu(cpu) {
		const struct lab_speed *speed = per_cpu_ptr(&lab_speed, cpu);
		u64 capacity = arch_scale_cpu_capacity(cpu);

		full = max(full, div_u64(capacity * speed->khz_top,
					 speed->khz_ref));
	}
	lab_speed_full = full;
}

static int lab_speed_hotplug;

static int lab_speed_enable(void)
{
	int ret;

	lab_speed_find_full();
	ret = register_trace_sched_entry_tp(lab_speed_sched_entry, NULL);
	if (ret)
		return ret;
	ret = register_trace_sched_exit_tp(lab_speed_sched_exit, NULL);
	if (ret)
		goto entry;
	ret = cpuhp_setup_state(CPUHP_AP_ONLINE_DYN, "lab/speed:online",
				lab_speed_online, lab_speed_offline);
	if (ret < 0)
		goto exit;
	lab_speed_hotplug = ret;
	return 0;

exit:
	unregister_trace_sched_exit_tp(lab_speed_sched_exit, NULL);
entry:
	unregister_trace_sched_entry_tp(lab_speed_sched_entry, NULL);
	tracepoint_synchronize_unregister();
	return ret;
}

static void lab_speed_disable(void)
{
	cpuhp_remove_state(lab_speed_hotplug);
	unregister_trace_sched_exit_tp(lab_speed_sched_exit, NULL);
	unregister_trace_sched_entry_tp(lab_speed_sched_entry, NULL);
	tracepoint_synchronize_unregister();
}

/* The kernel's lock for this module's parameters protects both. */
static bool lab_speed_model;
static bool lab_speed_ready;

static int lab_speed_switch(bool on)
{
	int ret = 0;

	if (on)
		ret = lab_speed_enable();
	else
		lab_speed_disable();
	return ret;
}

static int lab_speed_param_set(const char *text, const struct kernel_param *kp)
{
	bool on;
	int ret;

	ret = kstrtobool(text, &on);
	if (ret)
		return ret;
	/* Given when the module is loaded: done when it is ready. */
	if (lab_speed_ready && on != lab_speed_model) {
		ret = lab_speed_switch(on);
		if (ret)
			return ret;
	}
	lab_speed_model = on;
	return 0;
}

static const struct kernel_param_ops lab_speed_param_ops = {
	.set = lab_speed_param_set,
	.get = param_get_bool,
};

module_param_cb(speed_model, &lab_speed_param_ops, &lab_speed_model, 0644);
__MODULE_PARM_TYPE(speed_model, "bool");
MODULE_PARM_DESC(speed_model, "a CPU's speed follows its frequency");

int lab_speed_init(void)
{
	int ret = 0;

	kernel_param_lock(THIS_MODULE);
	if (lab_speed_model)
		ret = lab_speed_switch(true);
	lab_speed_ready = !ret;
	kernel_param_unlock(THIS_MODULE);
	return ret;
}

void lab_speed_exit(void)
{
	kernel_param_lock(THIS_MODULE);
	if (lab_speed_model)
		lab_speed_switch(false);
	lab_speed_model = false;
	lab_speed_ready = false;
	kernel_param_unlock(THIS_MODULE);
}
