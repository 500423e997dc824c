// SPDX-License-Identifier: GPL-2.0-only
/*
 * A way around a defect of the emulator of AMD's virtualization.
 *
 * It keeps the number of an interrupt that KVM injects as the CPU's pending
 * exception until the guest's next exit. If the CPU's turn ends before that,
 * the guest gets the interrupt once more, whether it takes interrupts or not,
 * and locks up or crashes. So this module makes each entry with an interrupt
 * exit before the guest's first instruction, as KVM itself does for a forced
 * exit: by an IPI to this CPU, which is pending when the guest is entered.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/irq_work.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/percpu.h>
#include <linux/sched.h>

/* Whose vCPU was given an interrupt here, and has not been entered since. */
static DEFINE_PER_CPU(struct task_struct *, lab_svm_injected);

static void lab_svm_nothing(struct irq_work *work)
{
}

static DEFINE_PER_CPU(struct irq_work, lab_svm_exit) =
	IRQ_WORK_INIT_HARD(lab_svm_nothing);

static int lab_svm_inject(struct kprobe *probe, struct pt_regs *regs)
{
	this_cpu_write(lab_svm_injected, current);
	return 0;
}

/* Interrupts are off from here to the entry. The thread may have moved since. */
static int lab_svm_enter(struct kprobe *probe, struct pt_regs *regs)
{
	unsigned int cpu;

	for_each_online_cpu(cpu) {
		if (READ_ONCE(per_cpu(lab_svm_injected, cpu)) != current)
			continue;
		WRITE_ONCE(per_cpu(lab_svm_injected, cpu), NULL);
		irq_work_queue(this_cpu_ptr(&lab_svm_exit));
	}
	return 0;
}

static struct kprobe lab_svm_inject_probe = {
	.symbol_name = "svm_inject_irq",
	.pre_handler = lab_svm_inject,
};

static struct kprobe lab_svm_enter_probe = {
	.symbol_name = "svm_vcpu_run",
	.pre_handler = lab_svm_enter,
};

static struct kprobe *lab_svm_probes[] = {
	&lab_svm_inject_probe,
	&lab_svm_enter_probe,
};

static int __init lab_svm_init(void)
{
	int ret = register_kprobes(lab_svm_probes, ARRAY_SIZE(lab_svm_probes));

	if (ret)
		pr_err("no probes of kvm-amd: %d\n", ret);
	return ret;
}
module_init(lab_svm_init);

static void __exit lab_svm_exit_module(void)
{
	unsigned int cpu;

	unregister_kprobes(lab_svm_probes, ARRAY_SIZE(lab_svm_probes));
	for_each_possible_cpu(cpu)
		irq_work_sync(per_cpu_ptr(&lab_svm_exit, cpu));
}
module_exit(lab_svm_exit_module);

MODULE_DESCRIPTION("Guests of an emulated AMD CPU exit before an interrupt's handler");
MODULE_LICENSE("GPL");
