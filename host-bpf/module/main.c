// SPDX-License-Identifier: GPL-2.0-only
/*
 * Host module of vcpufreq: lets the BPF programs of a VMM put a guest's
 * requests into force in the vCPU's own context.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>

#include "internal.h"

static int __init vcpufreq_init(void)
{
	int ret;

	ret = vcpufreq_kfunc_init();
	if (ret) {
		pr_err("the kernel doesn't take the function for BPF (%d): was the module built with BTF?\n",
		       ret);
		return ret;
	}
	ret = vcpufreq_vm_init();
	if (ret)
		pr_err("cannot make the device: %d\n", ret);
	return ret;
}
module_init(vcpufreq_init);

static void __exit vcpufreq_exit(void)
{
	vcpufreq_vm_exit();
}
module_exit(vcpufreq_exit);

MODULE_DESCRIPTION("Guests' frequency requests put into force in the vCPU's context, for BPF");
MODULE_LICENSE("GPL");
