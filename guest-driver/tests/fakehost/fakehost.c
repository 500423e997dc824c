// SPDX-License-Identifier: GPL-2.0-only
/*
 * A host with performance tables, played by a module in the guest: for tests
 * of the driver on a kernel that no VMM gives the device. The driver's own
 * files are included as they are, with register accesses that come here;
 * this file takes the place of vcpufreq_of.c and vcpufreq_pci.c.
 *
 * Parameters set what the host has; those that begin with asked_ show what
 * the driver wrote, each by CPU number. It can lie, as the host of a protected
 * guest may: by its registers, and in memory that the driver shares, at any time.
 */

#include <linux/delay.h>
#include <linux/err.h>
#include <linux/io.h>
#include <linux/jhash.h>
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/platform_device.h>
#include <linux/spinlock.h>

static u32 fakehost_read(const void __iomem *addr);
static void fakehost_write(u32 value, void __iomem *addr);

#undef readl_relaxed
#define readl_relaxed(addr) fakehost_read(addr)
#undef writel_relaxed
#define writel_relaxed(value, addr) fakehost_write(value, addr)

#include "../../vcpufreq_probe.c"
#include "../../vcpufreq_scale.c"
#include "../../vcpufreq_ceiling.c"
#include "../../vcpufreq_cap.c"
#include "../../vcpufreq_steal.c"
#include "../../vcpufreq_capacity.c"
#include "../../vcpufreq_em.c"
#include "../../vcpufreq_pages.c"
#include "../../vcpufreq_core.c"

#define FAKE_CPUS 8
#define FAKE_BASE ((void __iomem *)0x10000)

static unsigned int table_khz[VCPUFREQ_PERFTBL_MAX];
static unsigned int table_len;
module_param_array(table_khz, uint, &table_len, 0444);
MODULE_PARM_DESC(table_khz, "performance table of each CPU");

static unsigned int short_cpu = FAKE_CPUS;
module_param(short_cpu, uint, 0444);
MODULE_PARM_DESC(short_cpu, "CPU whose table ends one entry earlier");

static unsigned int domain[FAKE_CPUS];
module_param_array(domain, uint, NULL, 0444);
MODULE_PARM_DESC(domain, "domain of each CPU");

static unsigned int cur_khz[FAKE_CPUS];
module_param_array(cur_khz, uint, NULL, 0644);
MODULE_PARM_DESC(cur_khz, "what the host gives each CPU");

static unsigned int cap_khz[FAKE_CPUS];
module_param_array(cap_khz, uint, NULL, 0644);
MODULE_PARM_DESC(cap_khz, "what the host allows each CPU");

static unsigned int asked_khz[FAKE_CPUS];
module_param_array(asked_khz, uint, NULL, 0444);
MODULE_PARM_DESC(asked_khz, "what was last asked for each CPU");

static unsigned int asked_least_khz[FAKE_CPUS];
module_param_array(asked_least_khz, uint, NULL, 0644);
MODULE_PARM_DESC(asked_least_khz, "least request but 0 since this was set");

static unsigned int asked_ceilings[FAKE_CPUS];
module_param_array(asked_ceilings, uint, NULL, 0644);
MODULE_PARM_DESC(asked_ceilings, "requests that are the most, too");

static unsigned int asked_renewals[FAKE_CPUS];
module_param_array(asked_renewals, uint, NULL, 0444);
MODULE_PARM_DESC(asked_renewals, "those that ask for what was asked for before");

static unsigned int asked_outside;
module_param(asked_outside, uint, 0444);
MODULE_PARM_DESC(asked_outside, "requests written by a CPU of another domain");

static unsigned int features;
module_param(features, uint, 0444);
MODULE_PARM_DESC(features, "what the host has beyond the binding");

/* Values of @lies: what changes is anything; what is fixed is, too. */
enum { LIES_OF_CHANGES = 1, LIES_OF_ALL };

static unsigned int lies;
module_param(lies, uint, 0644);
MODULE_PARM_DESC(lies, "1: what changes is anything; 2: what is fixed is, too");

static unsigned int selected[FAKE_CPUS];
static struct platform_device *fakehost_pdev;
static struct vcpufreq *fakehost_vf;

/* What the driver shares: a page for each CPU, or NULL. */
static u8 *shared;
static DEFINE_SPINLOCK(shared_lock);
static struct task_struct *liar;

/* What is at a limit comes more often than the rest. Each run has the same lies. */
static u32 fakehost_lie(void)
{
	static const u32 limits[] = {
		0, 1, 2, VCPUFREQ_PERFTBL_MAX, VCPUFREQ_PERFTBL_MAX + 1,
		S32_MAX, S32_MAX + 1U, U32_MAX - 2, U32_MAX - 1, U32_MAX,
	};
	static atomic_t told = ATOMIC_INIT(0);
	u32 any = jhash_1word(atomic_inc_return(&told), 0);

	return any % 2 ? any : limits[any / 2 % ARRAY_SIZE(limits)];
}

static int fakehost_scribble(void *unused)
{
	static const unsigned int regs[] = { VCPUFREQ_REG_CUR_PERF, VCPUFREQ_REG_PERF_CAP };
	unsigned int cpu, i;

	while (!kthread_should_stop()) {
		spin_lock(&shared_lock);
		for (cpu = 0; shared && cpu < nr_cpu_ids; cpu++)
			for (i = 0; i < ARRAY_SIZE(regs); i++) {
				u32 honest = i ? cap_khz[cpu] : cur_khz[cpu];
				u32 *word = (u32 *)(shared + cpu * VCPUFREQ_STRIDE + regs[i]);

				WRITE_ONCE(*word, READ_ONCE(lies) ? fakehost_lie() : honest);
			}
		spin_unlock(&shared_lock);
		usleep_range(100, 200);
	}

	return 0;
}

static unsigned int len_of(unsigned int cpu)
{
	return cpu == short_cpu ? table_len - 1 : table_len;
}

static u32 fakehost_read(const void __iomem *addr)
{
	unsigned int offset = addr - (const void __iomem *)FAKE_BASE;
	unsigned int cpu = offset / VCPUFREQ_STRIDE, told = READ_ONCE(lies);

	offset %= VCPUFREQ_STRIDE;
	if (told == LIES_OF_ALL || (told == LIES_OF_CHANGES &&
				    (offset == VCPUFREQ_REG_CUR_PERF ||
				     offset == VCPUFREQ_REG_PERF_CAP)))
		return fakehost_lie();

	switch (offset) {
	case VCPUFREQ_REG_CUR_PERF:
		return READ_ONCE(cur_khz[cpu]);
	case VCPUFREQ_REG_PERFTBL_LEN:
		return len_of(cpu);
	case VCPUFREQ_REG_PERFTBL_RD:
		return selected[cpu] < len_of(cpu) ? table_khz[selected[cpu]] : 0;
	case VCPUFREQ_REG_PERF_DOMAIN:
		return domain[cpu];
	case VCPUFREQ_REG_FEATURES:
		return features;
	case VCPUFREQ_REG_PERF_CAP:
		return READ_ONCE(cap_khz[cpu]);
	}

	return 0;
}

static void fakehost_asked(unsigned int cpu, u32 value)
{
	u32 khz = value & VCPUFREQ_SET_PERF_KHZ;

	if (value > VCPUFREQ_SET_PERF_KHZ) {
		asked_ceilings[cpu]++;
		if (khz == asked_khz[cpu])
			asked_renewals[cpu]++;
	}
	if (domain[raw_smp_processor_id()] != domain[cpu])
		asked_outside++;
	if (khz && khz < asked_least_khz[cpu])
		asked_least_khz[cpu] = khz;
	WRITE_ONCE(asked_khz[cpu], khz);
}

static void fakehost_write(u32 value, void __iomem *addr)
{
	unsigned int offset = addr - FAKE_BASE;
	unsigned int cpu = offset / VCPUFREQ_STRIDE;

	switch (offset % VCPUFREQ_STRIDE) {
	case VCPUFREQ_REG_SET_PERF:
		fakehost_asked(cpu, value);
		break;
	case VCPUFREQ_REG_PERFTBL_SEL:
		selected[cpu] = value;
		break;
	case VCPUFREQ_REG_SHARED_PAGES:
		spin_lock(&shared_lock);
		shared = value ? phys_to_virt((phys_addr_t)value << VCPUFREQ_SHARED_PAGE_SHIFT) :
				 NULL;
		spin_unlock(&shared_lock);
		break;
	}
}

static int __init fakehost_init(void)
{
	const struct vcpufreq_io io = {
		.regs = FAKE_BASE,
		.size = FAKE_CPUS * VCPUFREQ_STRIDE,
	};

	if (nr_cpu_ids > FAKE_CPUS)
		return -E2BIG;

	fakehost_pdev = platform_device_register_simple("vcpufreq-fakehost", -1, NULL, 0);
	if (IS_ERR(fakehost_pdev))
		return PTR_ERR(fakehost_pdev);

	liar = kthread_run(fakehost_scribble, NULL, "fakehost");
	if (IS_ERR(liar)) {
		platform_device_unregister(fakehost_pdev);
		return PTR_ERR(liar);
	}

	fakehost_vf = vcpufreq_register(&fakehost_pdev->dev, &io);
	if (IS_ERR(fakehost_vf)) {
		kthread_stop(liar);
		platform_device_unregister(fakehost_pdev);
		return PTR_ERR(fakehost_vf);
	}

	return 0;
}
module_init(fakehost_init);

static void __exit fakehost_exit(void)
{
	vcpufreq_unregister(fakehost_vf);
	kthread_stop(liar);
	platform_device_unregister(fakehost_pdev);
}
module_exit(fakehost_exit);
