// SPDX-License-Identifier: GPL-2.0-only
/*
 * cpufreq driver of a guest: a request for performance goes to the host by
 * one register write, and the host's own governor acts on it.
 *
 * A CPU of the policy writes each request to the register of policy->cpu. The
 * thread that leaves the guest is then one that the host has to adjust, and the
 * host needs to reach no other. If the host sets VCPUFREQ_FEATURE_ANY_CPU, any
 * CPU may write: when one CPU moves a task to an idle one, the frequency is set
 * before the task runs.
 *
 * A request of 0 withdraws the last one: it no longer keeps the host fast or
 * slow.
 */

#include <linux/cpufreq.h>
#include <linux/device.h>
#include <linux/module.h>
#include <linux/smp.h>

#ifdef CONFIG_X86
#include <asm/cpufeature.h>
#endif

#include "vcpufreq.h"

#define VCPUFREQ_NO_REQUEST 0

static void vcpufreq_request(struct cpufreq_policy *policy, u32 perf)
{
	struct vcpufreq_domain *domain = policy->driver_data;
	unsigned int cpu = policy->cpu;

	/*
	 * Memory keeps each request, and a server that takes over carries out all:
	 * a domain has one, whichever of its CPUs is online.
	 */
	if (domain->vf->io.cells)
		cpu = cpumask_first(&domain->cpus);

	vcpufreq_ask(domain, cpu, perf);
}

struct vcpufreq_remote_request {
	struct cpufreq_policy *policy;
	u32 perf;
};

static void vcpufreq_remote_request(void *data)
{
	const struct vcpufreq_remote_request *req = data;

	vcpufreq_request(req->policy, req->perf);
}

/* From any CPU, but not with interrupts off. */
static int vcpufreq_request_on_cpu(struct cpufreq_policy *policy, u32 perf)
{
	struct vcpufreq_remote_request req = {
		.policy = policy,
		.perf = perf,
	};

	return smp_call_function_single(policy->cpu, vcpufreq_remote_request,
					&req, true);
}

/*
 * Called by the scheduler with a run queue locked, on a CPU of the policy unless
 * any CPU may ask.
 */
static unsigned int vcpufreq_fast_switch(struct cpufreq_policy *policy,
					 unsigned int target_freq)
{
	vcpufreq_request(policy, target_freq);

	return target_freq;
}

/*
 * A notifier of x86 takes each transition for one of the TSC, unless that is
 * constant, and marks it unstable. Many CPU models of VMMs don't have it so,
 * and no request changes the TSC.
 */
static bool vcpufreq_can_notify(void)
{
#ifdef CONFIG_X86
	return boot_cpu_has(X86_FEATURE_CONSTANT_TSC);
#else
	return true;
#endif
}

/* The statistics don't see it. */
static int vcpufreq_target_unnotified(struct cpufreq_policy *policy,
				      unsigned int target_freq)
{
	int ret = vcpufreq_request_on_cpu(policy, target_freq);

	if (!ret)
		policy->cur = target_freq;

	return ret;
}

/*
 * For governors without fast switch. The core has already brought the target
 * onto the table, if there is one, so this serves CPUs with and without.
 */
static int vcpufreq_target(struct cpufreq_policy *policy,
			   unsigned int target_freq, unsigned int relation)
{
	struct cpufreq_freqs freqs = {
		.old = policy->cur,
		.new = target_freq,
	};
	int ret;

	if (!vcpufreq_can_notify())
		return vcpufreq_target_unnotified(policy, target_freq);

	cpufreq_freq_transition_begin(policy, &freqs);
	ret = vcpufreq_request_on_cpu(policy, target_freq);
	cpufreq_freq_transition_end(policy, &freqs, ret);

	return ret;
}

static int vcpufreq_verify(struct cpufreq_policy_data *policy)
{
	if (policy->freq_table)
		return cpufreq_generic_frequency_table_verify(policy);

	cpufreq_verify_within_cpu_limits(policy);

	return 0;
}

static int vcpufreq_init(struct cpufreq_policy *policy)
{
	struct vcpufreq *vf = cpufreq_get_driver_data();
	struct vcpufreq_domain *domain = vf->domain[policy->cpu];
	int ret;

	policy->driver_data = domain;
	domain->policy = policy;
	cpumask_copy(policy->cpus, &domain->cpus);

	policy->cpuinfo.min_freq = vcpufreq_has_table(domain) ?
				   domain->table[0].frequency : 1;
	policy->cpuinfo.max_freq = vcpufreq_perf_max(domain);
	if (vcpufreq_has_table(domain))
		policy->freq_table = domain->table;

	policy->dvfs_possible_from_any_cpu = vf->any_cpu;
	policy->fast_switch_possible = true;

	/*
	 * The core drops a target that equals policy->cur. So cur has to be
	 * what the host was really asked for, or the performance governor
	 * would never ask; and in the table, or there are no statistics.
	 */
	policy->cur = policy->cpuinfo.max_freq;
	ret = vcpufreq_request_on_cpu(policy, policy->cur);
	if (ret)
		return ret;

	vcpufreq_em_init(domain);
	vcpufreq_cap_start(domain, policy);
	vcpufreq_scale_start(domain);

	return 0;
}

static void vcpufreq_exit(struct cpufreq_policy *policy)
{
	struct vcpufreq_domain *domain = policy->driver_data;

	vcpufreq_scale_stop(domain);
	vcpufreq_cap_stop(domain);
	vcpufreq_em_exit(domain);
}

/*
 * Suspend, or the last CPU of the policy goes offline: policy->cpus is empty
 * by then, but policy->cpu still runs.
 */
static int vcpufreq_withdraw(struct cpufreq_policy *policy)
{
	return vcpufreq_request_on_cpu(policy, VCPUFREQ_NO_REQUEST);
}

static int vcpufreq_renew(struct cpufreq_policy *policy)
{
	return vcpufreq_request_on_cpu(policy, policy->cur);
}

/* 0: the host doesn't know, or has gone. */
static u32 vcpufreq_host_khz(const struct vcpufreq *vf, unsigned int cpu)
{
	u32 perf = vcpufreq_read(vf, cpu, VCPUFREQ_REG_CUR_PERF);

	return perf == VCPUFREQ_SHM_GONE ? 0 : perf;
}

/*
 * host_cur_freq: the host's frequency for each of affected_cpus now, in kHz and
 * in that order. Not cpufreq's cpuinfo_cur_freq: the core takes its value for
 * the last request, drops the next equal one, and its statistics break if the
 * value isn't in the table.
 */
static ssize_t show_host_cur_freq(struct cpufreq_policy *policy, char *buf)
{
	const struct vcpufreq_domain *domain = policy->driver_data;
	unsigned int cpu;
	ssize_t len = 0;

	for_each_cpu(cpu, policy->cpus)
		len += sysfs_emit_at(buf, len, "%s%u", len ? " " : "",
				     vcpufreq_host_khz(domain->vf, cpu));

	return len + sysfs_emit_at(buf, len, "\n");
}

cpufreq_freq_attr_ro(host_cur_freq);

static struct freq_attr *vcpufreq_attrs[] = {
	&host_cur_freq,
	NULL
};

static const struct cpufreq_driver vcpufreq_driver = {
	.name = "vcpufreq-guest",
	.flags = CPUFREQ_HAVE_GOVERNOR_PER_POLICY,
	.init = vcpufreq_init,
	.exit = vcpufreq_exit,
	.online = vcpufreq_renew,
	.offline = vcpufreq_withdraw,
	.suspend = vcpufreq_withdraw,
	.resume = vcpufreq_renew,
	.verify = vcpufreq_verify,
	.target = vcpufreq_target,
	.fast_switch = vcpufreq_fast_switch,
	.register_em = vcpufreq_em_register,
	.attr = vcpufreq_attrs,
};

/**
 * vcpufreq_register() - check a device and make it the system's cpufreq driver
 * @dev:	device that it was found through
 * @io:		its registers
 *
 * Return: the device, or an error pointer: -EINVAL when a check failed,
 * -EEXIST when the system has a cpufreq driver already. The cause is logged.
 */
struct vcpufreq *vcpufreq_register(struct device *dev,
				   const struct vcpufreq_io *io)
{
	struct vcpufreq *vf;
	int ret;

	vf = devm_kzalloc(dev, sizeof(*vf), GFP_KERNEL);
	if (!vf)
		return ERR_PTR(-ENOMEM);

	vf->dev = dev;
	vf->io = *io;
	ret = vcpufreq_read_host(vf);
	if (ret)
		return ERR_PTR(ret);

	ret = vcpufreq_caps_init(vf);
	if (ret)
		return ERR_PTR(ret);

	vcpufreq_pages_share(vf);

	/* Energy models are made of them when the policies are. */
	vcpufreq_capacity_set(vf);

	vf->driver = vcpufreq_driver;
	vf->driver.driver_data = vf;
	ret = cpufreq_register_driver(&vf->driver);
	if (ret) {
		vcpufreq_capacity_restore(vf);
		vcpufreq_caps_exit(vf);
		vcpufreq_pages_unshare(vf);
	}
	if (ret == -EEXIST)
		return dev_err_ptr_probe(dev, ret, "the cpufreq driver %s is in use\n",
					 cpufreq_get_current_driver() ?: "(gone)");
	if (ret)
		return dev_err_ptr_probe(dev, ret, "cannot register with cpufreq\n");

	if (!IS_ENABLED(CONFIG_GENERIC_ARCH_TOPOLOGY))
		dev_info(dev, "no frequency invariance: this architecture takes none from a driver\n");

	return vf;
}

/**
 * vcpufreq_unregister() - undo vcpufreq_register()
 * @vf:		the device
 *
 * Requests are withdrawn, load tracking and capacities that came from the device
 * are as without a driver. Two things stay, as the kernel can't take them back:
 * energy models, and the CPU capacities that it derived from the highest
 * frequencies.
 */
void vcpufreq_unregister(struct vcpufreq *vf)
{
	cpufreq_unregister_driver(&vf->driver);
	vcpufreq_capacity_restore(vf);
	vcpufreq_caps_exit(vf);
	vcpufreq_pages_unshare(vf);
}

MODULE_DESCRIPTION("Guest driver of the vcpufreq bridge");
MODULE_LICENSE("GPL");
