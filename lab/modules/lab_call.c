// SPDX-License-Identifier: GPL-2.0-only
/* Hypercalls of a guest for a program in it, timed: user space can't make them. */
#include <linux/arm-smccc.h>
#include <linux/ktime.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/uaccess.h>

#include "lab_call.h"

static long lab_call_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	void __user *user = (void __user *)arg;
	struct arm_smccc_res res = {};
	struct lab_call call;
	u64 start, i;

	if (cmd != LAB_CALL)
		return -ENOTTY;
	if (copy_from_user(&call, user, sizeof(call)))
		return -EFAULT;
	if (!call.times || call.times > 1000000)
		return -EINVAL;
	start = ktime_get_ns();
	for (i = 0; i < call.times; i++)
		arm_smccc_1_1_hvc(call.function, call.argument, &res);
	call.ns = ktime_get_ns() - start;
	call.result = res.a0;
	return copy_to_user(user, &call, sizeof(call)) ? -EFAULT : 0;
}

static const struct file_operations lab_call_fops = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = lab_call_ioctl,
};

static struct miscdevice lab_call_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "lab_call",
	.fops = &lab_call_fops,
	.mode = 0600,
};
module_misc_device(lab_call_device);

MODULE_DESCRIPTION("Hypercalls for a program in the lab's guest");
MODULE_LICENSE("GPL");
