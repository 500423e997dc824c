// SPDX-License-Identifier: GPL-2.0-only
/*
 * The function that BPF programs call.
 *
 * It is called with a guest's write half done: the vCPU's thread is in KVM,
 * in a program on the tracepoint kvm_mmio, in which nothing may sleep. So it
 * notes the request and has the rest done by the same thread, as task work,
 * which runs before KVM enters the guest again and before it returns to the
 * VMM: the clamp is in force before the guest's next instruction.
 */
#include <linux/bpf.h>
#include <linux/btf.h>
#include <linux/btf_ids.h>
#include <linux/module.h>
#include <linux/preempt.h>
#include <linux/sched.h>

#include "internal.h"

static void vcpufreq_run(struct callback_head *head)
{
	struct vcpufreq_work *work = container_of(head, struct vcpufreq_work, head);
	struct vcpufreq_vm *vm = work->vm;
	struct vcpufreq_domain *domain = &vm->domains[work->domain];
	u64 since_ns = work->since_ns;

	/*
	 * A request from now on is served by work of its own. Fully ordered:
	 * vcpufreq_clamp() reads @wanted after this store. See vcpufreq_queue().
	 */
	atomic_xchg(&work->queued, 0);
	if (!(current->flags & PF_EXITING))
		vcpufreq_clamp(domain, since_ns);
	vcpufreq_vm_put(vm);
}

static int vcpufreq_queue(struct vcpufreq_vm *vm, struct vcpufreq_work *work, u32 domain,
			  u64 since_ns)
{
	int ret;

	/*
	 * The caller has stored @wanted before, with a full barrier. So either this
	 * finds the 0 of vcpufreq_run(), or that one's vcpufreq_clamp() finds @wanted.
	 */
	if (atomic_xchg_acquire(&work->queued, 1)) {
		/* It has still to run, and will see what is wanted by then. */
		vcpufreq_vm_put(vm);
		return work->domain == domain ? 0 : -EBUSY;
	}
	work->vm = vm;
	work->domain = domain;
	work->since_ns = since_ns;
	init_task_work(&work->head, vcpufreq_run);
	ret = task_work_add(current, &work->head, TWA_RESUME);
	if (ret) {
		atomic_set(&work->queued, 0);
		vcpufreq_vm_put(vm);
	}
	return ret;
}

__bpf_kfunc_start_defs();

/**
 * vcpufreq_host_request - have a clamp put into force, on behalf of a vCPU
 * @domain: index of the domain, as bound by the current process
 * @vcpu: the vCPU that the current thread runs
 * @min: uclamp.min, 0 to @max
 * @max: uclamp.max, to 1024
 * @since_ns: when the guest asked, of bpf_ktime_get_ns(): the caller has looked
 *	at the clock already, and it counts for nothing but the VM's own stats
 *
 * Acts only on what the current process has bound itself.
 *
 * Return: 0; 1 when that is in force already; -EPERM from an interrupt or with
 * interrupts off; -EINVAL for values out of range; -ENOENT without such a domain
 * of this process;
 * -EOPNOTSUPP for a SCHED_DEADLINE thread, which clamps mean nothing to;
 * -ESRCH in a thread that ends.
 */
__bpf_kfunc int vcpufreq_host_request(u32 domain, u32 vcpu, u32 min, u32 max, u64 since_ns)
{
	u32 clamp = VCPUFREQ_CLAMP(min, max);
	struct vcpufreq_domain *bound;
	struct vcpufreq_work *work;
	struct vcpufreq_vm *vm;

	if (!in_task() || irqs_disabled())
		return -EPERM;
	if (min > max || max > 1024)
		return -EINVAL;
	if (current->flags & (PF_KTHREAD | PF_EXITING))
		return -ESRCH;
	if (current->policy == SCHED_DEADLINE)
		return -EOPNOTSUPP;
	vm = vcpufreq_vm_get_current();
	if (!vm)
		return -ENOENT;
	bound = vcpufreq_domain_at(vm, domain);
	work = vcpufreq_work_at(vm, vcpu);
	/* Pairs with the release in vcpufreq_bind(). */
	if (!bound || !work || !smp_load_acquire(&bound->bound)) {
		vcpufreq_vm_put(vm);
		return -ENOENT;
	}
	/*
	 * xchg, for its full barriers. Two vCPUs may ask for one domain at the same
	 * time: each stores what the domain wants in the program's @clamp, calls
	 * this, and looks at @clamp again, and calls again if that has changed.
	 *
	 *	vCPU A			vCPU B
	 *	clamp = a		clamp = b	exchange
	 *	wanted = a		wanted = b
	 *	<full barrier>
	 *	reads clamp
	 *
	 * Where A reads its own a, B's exchange of @clamp comes later, and B's store
	 * of @wanted later still: @wanted ends as b. Without the barrier, a weakly
	 * ordered CPU may read @clamp before its store of @wanted is seen; that then
	 * comes after B's, and a stays in force (the litmus test "R"). Emulators that
	 * run one CPU at a time never show it.
	 */
	if (xchg(&bound->wanted, clamp) == clamp && vcpufreq_is_in_force(bound, clamp)) {
		/* No other one is under way: the first to store it looks after it. */
		vcpufreq_vm_put(vm);
		return 1;
	}
	return vcpufreq_queue(vm, work, domain, since_ns);
}

__bpf_kfunc_end_defs();

BTF_KFUNCS_START(vcpufreq_kfuncs)
BTF_ID_FLAGS(func, vcpufreq_host_request)
BTF_KFUNCS_END(vcpufreq_kfuncs)

/*
 * Only in the context that it is made for. The kernel asks about the functions
 * of this module's BTF, and this is the only one for BPF. (Not by its number:
 * those in vcpufreq_kfuncs are the build's, which the kernel relocates in a
 * copy of its own for modules from outside its tree.)
 *
 * A tracepoint is found by its name when the program is attached, the kernel's
 * own before those of modules, so that its name is what it is: KVM's, built in on
 * arm64, a module's on x86-64. @dst_prog is a target that is a BPF program, @mod
 * the module of a function; a tracepoint has neither, whosever it is.
 */
static int vcpufreq_filter(const struct bpf_prog *prog, u32 kfunc_id)
{
	const char *name = prog->aux->attach_func_name;

	if (!name || prog->aux->dst_prog || prog->aux->mod)
		return -EACCES;
	if (prog->expected_attach_type == BPF_TRACE_RAW_TP && !strcmp(name, "kvm_mmio"))
		return 0;
	return -EACCES;
}

static const struct btf_kfunc_id_set vcpufreq_kfunc_set = {
	.owner = THIS_MODULE,
	.set = &vcpufreq_kfuncs,
	.filter = vcpufreq_filter,
};

int vcpufreq_kfunc_init(void)
{
	return register_btf_kfunc_id_set(BPF_PROG_TYPE_TRACING, &vcpufreq_kfunc_set);
}
