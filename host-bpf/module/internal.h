/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef VCPUFREQ_MODULE_INTERNAL_H
#define VCPUFREQ_MODULE_INTERNAL_H

#include <linux/atomic.h>
#include <linux/btf.h>
#include <linux/mutex.h>
#include <linux/nospec.h>
#include <linux/rcupdate.h>
#include <linux/refcount.h>
#include <linux/task_work.h>
#include <linux/types.h>

#include "vcpufreq-module.h"

#define VCPUFREQ_HOST_VCPUS_MAX	512

/* A clamp as one number, so that it is read and written in one go. */
#define VCPUFREQ_CLAMP(min, max)	((min) | (max) << 16)
#define VCPUFREQ_CLAMP_MIN(clamp)	((clamp) & 0xffff)
#define VCPUFREQ_CLAMP_MAX(clamp)	((clamp) >> 16)
/* What a thread or a group starts with. */
#define VCPUFREQ_CLAMP_NONE		VCPUFREQ_CLAMP(0, 1024)

struct file;
struct pid;

/**
 * struct vcpufreq_domain - what is clamped together
 * @bound: whether the rest is set; stored last
 * @wanted: the clamp that was asked for last
 * @lock: orders the threads that clamp, and guards what follows
 * @min: the group's file cpu.uclamp.min
 * @max: the group's file cpu.uclamp.max
 * @group: the group that the files are of, to be compared only
 * @force: the clamp that the files hold, unless another process has written them
 * @shown: the effective clamp of a thread of the group after the last write, which is
 *	lower than @force where a group above has a lower limit
 * @stats: for the VMM
 */
struct vcpufreq_domain {
	bool bound;
	u32 wanted;
	struct mutex lock;	/* orders the threads that clamp */
	struct file *min;
	struct file *max;
	const void *group;
	u32 force;
	u32 shown;
	struct vcpufreq_host_stats stats;
};

/**
 * struct vcpufreq_work - a request on its way into force, one for each vCPU
 * @head: queued to the vCPU's own thread
 * @vm: referenced while it is
 * @domain: index of the domain that was asked for
 * @queued: whether it is
 * @since_ns: when that was
 */
struct vcpufreq_work {
	struct callback_head head;
	struct vcpufreq_vm *vm;
	u32 domain;
	atomic_t queued;
	u64 since_ns;
};

/**
 * struct vcpufreq_vm - an open file of the device; holds the module
 * @node: in the table by @owner
 * @owner: the process that opened it
 * @refs: of the file and of each queued work
 * @setup: guards what follows until it is in the table
 * @vcpus: number of works; 0: not set up
 * @domain_count: number of domains
 * @works: a vCPU's each
 * @domains: as bound
 * @rcu: for freeing
 */
struct vcpufreq_vm {
	struct hlist_node node;
	struct pid *owner;
	refcount_t refs;
	struct mutex setup;	/* orders calls of the VMM */
	u32 vcpus;
	u32 domain_count;
	struct vcpufreq_work *works;
	struct vcpufreq_domain *domains;
	struct rcu_head rcu;
};

/**
 * vcpufreq_domain_at() - a domain by a number that a VMM or a guest has chosen
 * @vm: the VM
 * @number: any number
 *
 * A CPU that predicts the check wrongly loads from within the array, too.
 *
 * Return: the domain, or NULL if there is none of this number.
 */
static inline struct vcpufreq_domain *vcpufreq_domain_at(struct vcpufreq_vm *vm, u32 number)
{
	if (number >= vm->domain_count)
		return NULL;
	return &vm->domains[array_index_nospec(number, vm->domain_count)];
}

/**
 * vcpufreq_work_at() - a vCPU's work, by a number as in vcpufreq_domain_at()
 * @vm: the VM
 * @vcpu: any number
 *
 * Return: the work, or NULL if there is no vCPU of this number.
 */
static inline struct vcpufreq_work *vcpufreq_work_at(struct vcpufreq_vm *vm, u32 vcpu)
{
	if (vcpu >= vm->vcpus)
		return NULL;
	return &vm->works[array_index_nospec(vcpu, vm->vcpus)];
}

/* vm.c */
struct vcpufreq_vm *vcpufreq_vm_get_current(void);
void vcpufreq_vm_put(struct vcpufreq_vm *vm);
int vcpufreq_vm_init(void);
void vcpufreq_vm_exit(void);

/* clamp.c */
int vcpufreq_clamp(struct vcpufreq_domain *domain, u64 since_ns);
bool vcpufreq_is_in_force(const struct vcpufreq_domain *domain, u32 clamp);

/* kfunc.c */
__bpf_kfunc int vcpufreq_host_request(u32 domain, u32 vcpu, u32 min, u32 max, u64 since_ns);
int vcpufreq_kfunc_init(void);

#endif /* VCPUFREQ_MODULE_INTERNAL_H */
