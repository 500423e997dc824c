// SPDX-License-Identifier: GPL-2.0-only
/*
 * The module that DKMS builds in place of one that cannot work on a kernel, or does
 * not build for it. It binds to nothing, and loading it fails with the reason.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/errno.h>
#include <linux/init.h>
#include <linux/module.h>
#include <linux/printk.h>

static int __init empty_init(void)
{
	pr_err("this module is empty: %s\n", EMPTY_REASON);
	return -EOPNOTSUPP;
}
module_init(empty_init);

/* By this depmod's modules.alias tells it from the module. */
MODULE_ALIAS("empty:" KBUILD_MODNAME);
MODULE_DESCRIPTION("Empty: " EMPTY_REASON);
MODULE_LICENSE("GPL");
