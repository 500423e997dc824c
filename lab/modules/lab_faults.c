// SPDX-License-Identifier: GPL-2.0-only
/*
 * Faults on purpose. A test loads it with one of them on a kernel with checks
 * of its own, and sees that the kernel reports that. Never load it elsewhere.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/delay.h>
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>

static char *fault;
module_param(fault, charp, 0444);
MODULE_PARM_DESC(fault, "which one: use-after-free, shift, inversion, rcu, sleep, leak, race");

static void use_after_free(void)
{
	int *number = kmalloc(64, GFP_KERNEL);
	int *stale = number;

	/* The compiler knows that they are one, and would refuse. */
	OPTIMIZER_HIDE_VAR(stale);
	kfree(number);
	if (stale)
		READ_ONCE(*stale);
}

static void shift_too_far(void)
{
	int by = BITS_PER_TYPE(int);
	int number = 1;

	OPTIMIZER_HIDE_VAR(by);
	number <<= by;
	OPTIMIZER_HIDE_VAR(number);
}

static DEFINE_MUTEX(first);
static DEFINE_MUTEX(second);

static void lock_inversion(void)
{
	mutex_lock(&first);
	mutex_lock(&second);
	mutex_unlock(&second);
	mutex_unlock(&first);

	mutex_lock(&second);
	mutex_lock(&first);
	mutex_unlock(&first);
	mutex_unlock(&second);
}

static int __rcu *watched;

static void read_outside_of_rcu(void)
{
	if (rcu_dereference(watched))
		pr_info("nothing is there\n");
}

static void sleep_while_atomic(void)
{
	preempt_disable();
	mutex_lock(&first);
	mutex_unlock(&first);
	preempt_enable();
}

/* Several, as the address of the last one may remain on a stack. */
static void leak(void)
{
	int i;

	for (i = 0; i < 8; i++) {
		int *lost = kmalloc(256, GFP_KERNEL);

		/* What nothing uses the compiler wouldn't allocate. */
		if (lost)
			WRITE_ONCE(*lost, i);
	}
}

static unsigned long counted;

static int count_up(void *unused)
{
	while (!kthread_should_stop()) {
		int i;

		for (i = 0; i < 10000; i++)
			counted++;
		cond_resched();
	}
	return 0;
}

static int count_twice(void)
{
	struct task_struct *one = kthread_run_on_cpu(count_up, NULL, 0, "lab_race/%u");
	struct task_struct *two = kthread_run_on_cpu(count_up, NULL, 1, "lab_race/%u");

	if (!IS_ERR(one) && !IS_ERR(two))
		msleep(2000);
	if (!IS_ERR(one))
		kthread_stop(one);
	if (!IS_ERR(two))
		kthread_stop(two);
	return PTR_ERR_OR_ZERO(one) ?: PTR_ERR_OR_ZERO(two);
}

static int __init lab_faults_init(void)
{
	if (!fault)
		return -EINVAL;
	if (!strcmp(fault, "use-after-free"))
		use_after_free();
	else if (!strcmp(fault, "shift"))
		shift_too_far();
	else if (!strcmp(fault, "inversion"))
		lock_inversion();
	else if (!strcmp(fault, "rcu"))
		read_outside_of_rcu();
	else if (!strcmp(fault, "sleep"))
		sleep_while_atomic();
	else if (!strcmp(fault, "leak"))
		leak();
	else if (!strcmp(fault, "race"))
		return count_twice();
	else
		return -EINVAL;
	return 0;
}
module_init(lab_faults_init);

static void __exit lab_faults_exit(void)
{
}
module_exit(lab_faults_exit);

MODULE_DESCRIPTION("Faults on purpose, for the lab's kernels with checks");
MODULE_LICENSE("GPL");
