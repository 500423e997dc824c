// SPDX-License-Identifier: GPL-2.0-only
/*
 * A periodic loop in the kernel, as a control task has it: a thread on one
 * CPU that is woken every 10 ms, and what its cycles took.
 *
 * A wake-up is due at a fixed grid of times, whatever became of the one before:
 * after a long cycle short ones follow, until the loop has caught up. A cycle
 * is from one wake-up of the thread to the next, so both are seen in it.
 *
 * The figures are in debugfs, vcpufreq_rt_loop/stats. One run for each load of
 * the module: its parameters don't change while it is there.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cpu.h>
#include <linux/debugfs.h>
#include <linux/hrtimer.h>
#include <linux/kthread.h>
#include <linux/ktime.h>
#include <linux/minmax.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/seq_file.h>
#include <linux/spinlock.h>
#include <uapi/linux/sched/types.h>

#define MIN_PERIOD_US 100
#define MAX_PERIOD_US 10000000

static unsigned int cpu;
module_param(cpu, uint, 0444);
MODULE_PARM_DESC(cpu, "CPU that the thread is bound to");

static unsigned int period_us = 10000;
module_param(period_us, uint, 0444);
MODULE_PARM_DESC(period_us, "time between two wake-ups, 100 to 10000000 us (default 10000)");

static unsigned int priority = 80;
module_param(priority, uint, 0444);
MODULE_PARM_DESC(priority, "SCHED_FIFO priority, 1 to 99; 0 is SCHED_OTHER (default 80)");

static unsigned int ignored = 1000;
module_param(ignored, uint, 0444);
MODULE_PARM_DESC(ignored, "first cycles that aren't counted (default 1000)");

struct rt_loop_stats {
	u64 cycles;
	u64 under;
	u64 over;
	u64 elsewhere;
	u64 shortest_ns;
	u64 longest_ns;
	unsigned int to_ignore;
};

/*
 * Raw: on an RT kernel a sleeping lock would let a reader of another CPU delay
 * the thread that is measured. It is held for a copy of the figures.
 */
static DEFINE_RAW_SPINLOCK(rt_loop_lock);
static struct rt_loop_stats rt_loop_now = { .shortest_ns = U64_MAX };
static struct task_struct *rt_loop_thread;
static struct dentry *rt_loop_dir;

static u64 rt_loop_under_ns(void)
{
	return (u64)period_us * 800;
}

static u64 rt_loop_over_ns(void)
{
	return (u64)period_us * 1200;
}

static void rt_loop_count(struct rt_loop_stats *stats, u64 ns)
{
	if (stats->to_ignore) {
		stats->to_ignore--;
		return;
	}
	stats->cycles++;
	stats->under += ns < rt_loop_under_ns();
	stats->over += ns > rt_loop_over_ns();
	/* When the CPU went offline, the scheduler chose another one. */
	stats->elsewhere += raw_smp_processor_id() != cpu;
	stats->shortest_ns = min(stats->shortest_ns, ns);
	stats->longest_ns = max(stats->longest_ns, ns);
}

static int rt_loop_run(void *unused)
{
	ktime_t last = ktime_get();
	ktime_t next = last;

	while (!kthread_should_stop()) {
		ktime_t now;

		next = ktime_add_us(next, period_us);
		/* Nothing else wakes it but kthread_stop(), after which it ends. */
		set_current_state(TASK_IDLE);
		if (kthread_should_stop())
			break;
		schedule_hrtimeout(&next, HRTIMER_MODE_ABS);
		now = ktime_get();
		raw_spin_lock(&rt_loop_lock);
		rt_loop_count(&rt_loop_now, ktime_to_ns(ktime_sub(now, last)));
		raw_spin_unlock(&rt_loop_lock);
		last = now;
	}
	__set_current_state(TASK_RUNNING);
	return 0;
}

static int stats_show(struct seq_file *out, void *unused)
{
	struct rt_loop_stats stats;

	raw_spin_lock(&rt_loop_lock);
	stats = rt_loop_now;
	raw_spin_unlock(&rt_loop_lock);
	if (!stats.cycles)
		stats.shortest_ns = 0;
	seq_printf(out, "cycles %llu\n", stats.cycles);
	seq_printf(out, "under_%llu_ns %llu\n", rt_loop_under_ns(), stats.under);
	seq_printf(out, "over_%llu_ns %llu\n", rt_loop_over_ns(), stats.over);
	seq_printf(out, "shortest_ns %llu\n", stats.shortest_ns);
	seq_printf(out, "longest_ns %llu\n", stats.longest_ns);
	seq_printf(out, "on_another_cpu %llu\n", stats.elsewhere);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(stats);

/* Of the class and priority that were asked for. */
static int rt_loop_schedule(struct task_struct *thread)
{
	struct sched_attr attr = {
		.size = sizeof(attr),
		.sched_policy = SCHED_FIFO,
		.sched_priority = priority,
	};

	return priority ? sched_setattr_nocheck(thread, &attr) : 0;
}

static int rt_loop_start(void)
{
	struct task_struct *thread;
	int ret;

	if (cpu >= nr_cpu_ids || !cpu_online(cpu)) {
		pr_err("CPU %u isn't online; name another with cpu=\n", cpu);
		return -EINVAL;
	}
	thread = kthread_create_on_node(rt_loop_run, NULL, cpu_to_node(cpu),
					"rt_loop/%u", cpu);
	if (IS_ERR(thread))
		return PTR_ERR(thread);
	kthread_bind(thread, cpu);
	ret = rt_loop_schedule(thread);
	if (ret) {
		kthread_stop(thread);
		return ret;
	}
	rt_loop_thread = thread;
	rt_loop_now.to_ignore = ignored;
	wake_up_process(thread);
	return 0;
}

static int __init rt_loop_init(void)
{
	int ret;

	if (period_us < MIN_PERIOD_US || period_us > MAX_PERIOD_US || priority > 99) {
		pr_err("period_us is %d to %d, priority 0 to 99\n", MIN_PERIOD_US,
		       MAX_PERIOD_US);
		return -EINVAL;
	}
	cpus_read_lock();
	ret = rt_loop_start();
	cpus_read_unlock();
	if (ret)
		return ret;
	rt_loop_dir = debugfs_create_dir("vcpufreq_rt_loop", NULL);
	debugfs_create_file("stats", 0400, rt_loop_dir, NULL, &stats_fops);
	return 0;
}
module_init(rt_loop_init);

static void __exit rt_loop_exit(void)
{
	debugfs_remove(rt_loop_dir);
	kthread_stop(rt_loop_thread);
}
module_exit(rt_loop_exit);

MODULE_DESCRIPTION("Periodic loop on one CPU, to see how exactly it is woken");
MODULE_LICENSE("GPL");
