// SPDX-License-Identifier: GPL-2.0-only
/*
 * Shows each CPU's arch_freq_scale, by which the scheduler takes its speed, 0 to 1024: the
 * parameter "scale" of this module.
 */
#include <linux/cpumask.h>
#include <linux/module.h>
#include <linux/sysfs.h>
#include <linux/topology.h>

static int scale_get(char *buffer, const struct kernel_param *kp)
{
	unsigned int cpu;
	int at = 0;

	for_each_possible_cpu(cpu)
		at += sysfs_emit_at(buffer, at, "%lu ", per_cpu(arch_freq_scale, cpu));

	return at;
}

static const struct kernel_param_ops scale_ops = { .get = scale_get };

module_param_cb(scale, &scale_ops, NULL, 0444);
MODULE_PARM_DESC(scale, "arch_freq_scale of each CPU");

MODULE_DESCRIPTION("Shows the scale of each CPU's speed");
MODULE_LICENSE("GPL");
