// SPDX-License-Identifier: GPL-2.0-only
/*
 * cpuidle driver of the lab's emulated host, which has no idle states but WFI.
 *
 * Every state here executes WFI. The deeper ones then spend their exit latency
 * on the CPU before it goes on. The time of a wake-up therefore shows the
 * choice of a state, and a limit to it by latency QoS. The states' power isn't
 * modelled.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <asm/barrier.h>
#include <asm/cpuidle.h>
#include <linux/cpuidle.h>
#include <linux/module.h>
#include <linux/smp.h>

#include "lab_spin.h"

/* Interrupts are off from before this until after it, spinning included. */
static __cpuidle int lab_idle_enter(struct cpuidle_device *dev,
				    struct cpuidle_driver *drv, int index)
{
	struct arm_cpuidle_irq_context context;

	arm_cpuidle_save_irq_context(&context);
	dsb(sy);
	wfi();
	arm_cpuidle_restore_irq_context(&context);
	/* The first state's figures are true of WFI as it is. */
	if (index > 0)
		lab_spin_ns(drv->states[index].exit_latency_ns);
	return index;
}

/*
 * Latencies and residencies in the range of what device trees of mobile SoCs
 * give for retention and power-down of a core; round figures, no one's own.
 *
 * No owner: a registered device holds a reference to it, and the module
 * couldn't be unloaded.
 */
static struct cpuidle_driver lab_idle_driver = {
	.name = "lab_cpuidle",
	.states = {
		{
			.name = "WFI",
			.desc = "wait for interrupt",
			.exit_latency = 1,
			.target_residency = 1,
			.enter = lab_idle_enter,
		},
		{
			.name = "core-ret",
			.desc = "core retention",
			.exit_latency = 100,
			.target_residency = 400,
			.enter = lab_idle_enter,
		},
		{
			.name = "core-off",
			.desc = "core power-down",
			.exit_latency = 900,
			.target_residency = 4000,
			.enter = lab_idle_enter,
		},
	},
	.state_count = 3,
};

static int __init lab_idle_init(void)
{
	int ret = cpuidle_register(&lab_idle_driver, NULL);

	if (ret)
		pr_err("cannot register: %d\n", ret);
	return ret;
}
module_init(lab_idle_init);

static void __exit lab_idle_exit(void)
{
	cpuidle_unregister(&lab_idle_driver);
	/*
	 * RCU doesn't watch a CPU inside lab_idle_enter(), so the core didn't
	 * wait for it. Interrupts are off in there: an IPI does wait.
	 */
	kick_all_cpus_sync();
}
module_exit(lab_idle_exit);

MODULE_DESCRIPTION("cpuidle driver of an emulated host: WFI with exit latencies");
MODULE_LICENSE("GPL");
