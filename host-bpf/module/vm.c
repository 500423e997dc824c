// SPDX-License-Identifier: GPL-2.0-only
/*
 * The device: what a VMM binds, for as long as it has the file open.
 */
#include <linux/cgroup.h>
#include <linux/cred.h>
#include <linux/dcache.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/hashtable.h>
#include <linux/kernfs.h>
#include <linux/magic.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/pid.h>
#include <linux/rcupdate.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/timekeeping.h>
#include <linux/uaccess.h>

#include "internal.h"

/* By owner; read under RCU, changed under the lock. */
static DEFINE_HASHTABLE(vcpufreq_vms, 6);
static DEFINE_SPINLOCK(vcpufreq_vms_lock);

static struct vcpufreq_vm *vcpufreq_vm_find(struct pid *owner)
{
	struct vcpufreq_vm *vm;

	hash_for_each_possible_rcu(vcpufreq_vms, vm, node, (unsigned long)owner,
				   lockdep_is_held(&vcpufreq_vms_lock))
		if (vm->owner == owner)
			return vm;
	return NULL;
}

/**
 * vcpufreq_vm_get_current - the VM of the current process
 *
 * Return: a reference, or NULL.
 */
struct vcpufreq_vm *vcpufreq_vm_get_current(void)
{
	struct vcpufreq_vm *vm;

	rcu_read_lock();
	vm = vcpufreq_vm_find(task_tgid(current));
	if (vm && !refcount_inc_not_zero(&vm->refs))
		vm = NULL;
	rcu_read_unlock();
	return vm;
}

static void vcpufreq_vm_free(struct rcu_head *rcu)
{
	struct vcpufreq_vm *vm = container_of(rcu, struct vcpufreq_vm, rcu);

	kvfree(vm->works);
	kvfree(vm->domains);
	kfree(vm);
}

/**
 * vcpufreq_vm_put - give a reference back
 * @vm: the VM
 */
void vcpufreq_vm_put(struct vcpufreq_vm *vm)
{
	u32 i;

	if (!refcount_dec_and_test(&vm->refs))
		return;
	for (i = 0; i < vm->domain_count; i++) {
		if (vm->domains[i].min)
			fput(vm->domains[i].min);
		if (vm->domains[i].max)
			fput(vm->domains[i].max);
	}
	put_pid(vm->owner);
	call_rcu(&vm->rcu, vcpufreq_vm_free);
	module_put(THIS_MODULE);
}

static int vcpufreq_open(struct inode *inode, struct file *file)
{
	struct vcpufreq_vm *vm = kzalloc(sizeof(*vm), GFP_KERNEL_ACCOUNT);

	if (!vm)
		return -ENOMEM;
	vm->owner = get_pid(task_tgid(current));
	refcount_set(&vm->refs, 1);
	mutex_init(&vm->setup);
	INIT_HLIST_NODE(&vm->node);
	/* Queued works outlive the file, which holds it until then. */
	__module_get(THIS_MODULE);
	file->private_data = vm;
	return 0;
}

static int vcpufreq_release(struct inode *inode, struct file *file)
{
	struct vcpufreq_vm *vm = file->private_data;

	spin_lock(&vcpufreq_vms_lock);
	hash_del_rcu(&vm->node);
	spin_unlock(&vcpufreq_vms_lock);
	vcpufreq_vm_put(vm);
	return 0;
}

/* From here on programs find it: one for a process. */
static int vcpufreq_publish(struct vcpufreq_vm *vm)
{
	int ret = 0;

	spin_lock(&vcpufreq_vms_lock);
	if (vcpufreq_vm_find(vm->owner))
		ret = -EBUSY;
	else
		hash_add_rcu(vcpufreq_vms, &vm->node, (unsigned long)vm->owner);
	spin_unlock(&vcpufreq_vms_lock);
	return ret;
}

/* As the file was when it was opened; no program has found it. */
static void vcpufreq_tear_down(struct vcpufreq_vm *vm)
{
	kvfree(vm->works);
	kvfree(vm->domains);
	vm->works = NULL;
	vm->domains = NULL;
	vm->vcpus = 0;
	vm->domain_count = 0;
}

static int vcpufreq_set_up(struct vcpufreq_vm *vm, const struct vcpufreq_host_vm *arg)
{
	int ret;
	u32 i;

	if (!arg->vcpus || arg->vcpus > VCPUFREQ_HOST_VCPUS_MAX ||
	    !arg->domains || arg->domains > arg->vcpus)
		return -EINVAL;
	if (vm->vcpus)
		return -EBUSY;
	vm->works = kvcalloc(arg->vcpus, sizeof(*vm->works), GFP_KERNEL_ACCOUNT);
	vm->domains = kvcalloc(arg->domains, sizeof(*vm->domains), GFP_KERNEL_ACCOUNT);
	if (!vm->works || !vm->domains) {
		vcpufreq_tear_down(vm);
		return -ENOMEM;
	}
	for (i = 0; i < arg->domains; i++)
		mutex_init(&vm->domains[i].lock);
	vm->domain_count = arg->domains;
	vm->vcpus = arg->vcpus;
	ret = vcpufreq_publish(vm);
	if (ret)
		vcpufreq_tear_down(vm);
	return ret;
}

/* The caller's own file of this name in a cgroup, open for writing. */
static struct file *vcpufreq_clamp_file(int fd, const char *name)
{
	struct file *file = fget(fd);

	if (!file)
		return ERR_PTR(-EBADF);
	if (!(file->f_mode & FMODE_WRITE) || !file->f_op->write_iter ||
	    file_inode(file)->i_sb->s_magic != CGROUP2_SUPER_MAGIC ||
	    strcmp(file->f_path.dentry->d_name.name, name)) {
		fput(file);
		return ERR_PTR(-EINVAL);
	}
	return file;
}

/*
 * The group of a file in it, to be compared only: a number by which its threads
 * are known. NULL when the group has been removed.
 */
static const void *vcpufreq_group_of(struct file *file)
{
	struct kernfs_node *dir = d_inode(file->f_path.dentry->d_parent)->i_private;
	const void *group = NULL;
	struct cgroup *cgroup;

	rcu_read_lock();
	/* Cleared when the group goes. */
	cgroup = rcu_dereference(*(void __rcu __force **)&dir->priv);
	if (cgroup)
		group = rcu_access_pointer(cgroup->subsys[cpu_cgrp_id]);
	rcu_read_unlock();
	return group;
}

static int vcpufreq_bind(struct vcpufreq_vm *vm, const struct vcpufreq_host_bind *arg)
{
	struct vcpufreq_domain *domain;
	struct file *min, *max;

	domain = vcpufreq_domain_at(vm, arg->domain);
	if (!domain)
		return -EINVAL;
	if (domain->bound)
		return -EBUSY;
	min = vcpufreq_clamp_file(arg->min_fd, "cpu.uclamp.min");
	if (IS_ERR(min))
		return PTR_ERR(min);
	max = vcpufreq_clamp_file(arg->max_fd, "cpu.uclamp.max");
	if (IS_ERR(max)) {
		fput(min);
		return PTR_ERR(max);
	}
	domain->min = min;
	domain->max = max;
	domain->group = vcpufreq_group_of(min);
	domain->wanted = VCPUFREQ_CLAMP_NONE;
	domain->force = VCPUFREQ_CLAMP_NONE;
	domain->shown = VCPUFREQ_CLAMP_NONE;
	/* A reader that sees it bound sees the rest. */
	smp_store_release(&domain->bound, true);
	return 0;
}

static int vcpufreq_apply(struct vcpufreq_vm *vm, const struct vcpufreq_host_apply *arg)
{
	bool counted = !(arg->flags & VCPUFREQ_HOST_UNCOUNTED);
	struct vcpufreq_domain *domain;

	domain = vcpufreq_domain_at(vm, arg->domain);
	if (!domain || arg->min > arg->max || arg->max > 1024)
		return -EINVAL;
	if (!domain->bound)
		return -ENOENT;
	WRITE_ONCE(domain->wanted, VCPUFREQ_CLAMP(arg->min, arg->max));
	return vcpufreq_clamp(domain, counted ? ktime_get_mono_fast_ns() : 0);
}

static int vcpufreq_stats(struct vcpufreq_vm *vm, void __user *to)
{
	struct vcpufreq_host_stats stats;
	struct vcpufreq_domain *domain;
	u32 number;

	if (copy_from_user(&stats, to, sizeof(stats)))
		return -EFAULT;
	number = stats.domain;
	domain = vcpufreq_domain_at(vm, number);
	if (!domain)
		return -EINVAL;
	mutex_lock(&domain->lock);
	stats = domain->stats;
	mutex_unlock(&domain->lock);
	stats.domain = number;
	return copy_to_user(to, &stats, sizeof(stats)) ? -EFAULT : 0;
}

static long vcpufreq_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct vcpufreq_vm *vm = file->private_data;
	void __user *from = (void __user *)arg;
	union {
		struct vcpufreq_host_vm vm;
		struct vcpufreq_host_bind bind;
		struct vcpufreq_host_apply apply;
	} in;
	long ret;

	if (cmd != VCPUFREQ_HOST_STATS) {
		if (_IOC_SIZE(cmd) > sizeof(in))
			return -ENOTTY;
		if (copy_from_user(&in, from, _IOC_SIZE(cmd)))
			return -EFAULT;
	}
	mutex_lock(&vm->setup);
	switch (cmd) {
	case VCPUFREQ_HOST_VM:
		ret = vcpufreq_set_up(vm, &in.vm);
		break;
	case VCPUFREQ_HOST_BIND:
		ret = vcpufreq_bind(vm, &in.bind);
		break;
	case VCPUFREQ_HOST_APPLY:
		ret = vcpufreq_apply(vm, &in.apply);
		break;
	case VCPUFREQ_HOST_STATS:
		ret = vcpufreq_stats(vm, from);
		break;
	default:
		ret = -ENOTTY;
	}
	mutex_unlock(&vm->setup);
	return ret;
}

static const struct file_operations vcpufreq_fops = {
	.owner = THIS_MODULE,
	.open = vcpufreq_open,
	.release = vcpufreq_release,
	.unlocked_ioctl = vcpufreq_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
};

static struct miscdevice vcpufreq_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "vcpufreq_host",
	.fops = &vcpufreq_fops,
	.mode = 0600,
};

int vcpufreq_vm_init(void)
{
	return misc_register(&vcpufreq_device);
}

/*
 * No file is open, no work is queued and no program that calls in is loaded:
 * all of them hold the module. What is left is memory on its way to be
 * freed, and a thread that has just given back the module and has still to
 * return from here.
 */
void vcpufreq_vm_exit(void)
{
	misc_deregister(&vcpufreq_device);
	rcu_barrier();
	synchronize_rcu_tasks();
}
