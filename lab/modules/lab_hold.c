// SPDX-License-Identifier: GPL-2.0-only
/*
 * Holds a CPU in an interrupt, as a slow handler would: for tests of what tells
 * why a thread was late. Write "CPU MICROSECONDS" to the parameter; it returns
 * when that is over. The interrupt is another CPU's call, so write from one.
 */
#include <linux/cpumask.h>
#include <linux/kernel.h>
#include <linux/moduleparam.h>
#include <linux/module.h>
#include <linux/smp.h>

#include "lab_spin.h"

/* Longer would be taken for a lock-up, or cost a run its time. */
#define LAB_HOLD_MAX_US	100000

static void lab_hold_spin(void *us)
{
	lab_spin_ns(*(unsigned int *)us * NSEC_PER_USEC);
}

static int lab_hold_set(const char *text, const struct kernel_param *kp)
{
	unsigned int cpu, us;

	if (sscanf(text, "%u %u", &cpu, &us) != 2)
		return -EINVAL;
	if (cpu >= nr_cpu_ids || us > LAB_HOLD_MAX_US)
		return -ERANGE;
	return smp_call_function_single(cpu, lab_hold_spin, &us, true);
}

static const struct kernel_param_ops lab_hold_ops = {
	.set = lab_hold_set,
};

module_param_cb(hold, &lab_hold_ops, NULL, 0200);
MODULE_PARM_DESC(hold, "CPU and microseconds: hold it in an interrupt for so long");

MODULE_DESCRIPTION("Interrupts of any length for the lab's emulated host");
MODULE_LICENSE("GPL");
