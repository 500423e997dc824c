/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Guest side of the vcpufreq bridge: declarations for the files of the driver.
 *
 * vcpufreq_main.c      registers the ways to find a device
 * vcpufreq_of.c        finds the registers, or memory, in the device tree
 * vcpufreq_pci.c       finds them as memory and doorbell of a PCI device
 * vcpufreq_shm.c       maps memory that the host shares, once it is checked
 * vcpufreq_pages.c     shares memory of a protected guest, for what the host tells
 * vcpufreq_probe.c     reads what the host tells, and checks all of it
 * vcpufreq_core.c      the cpufreq driver: requests to the host
 * vcpufreq_scale.c     frequency invariance: what the host gives, each tick
 * vcpufreq_ceiling.c   requests that are the most, too: a guest that holds itself down
 * vcpufreq_cap.c       a policy's maximum: what the host allows now
 * vcpufreq_steal.c     capacity that the host takes from a CPU by running something else
 * vcpufreq_capacity.c  CPU capacities from a device that gives them
 * vcpufreq_em.c        energy model from the device tree's OPPs, or the device
 */
#ifndef VCPUFREQ_H
#define VCPUFREQ_H

#include <linux/cpufreq.h>
#include <linux/cpumask.h>
#include <linux/io.h>
#include <linux/jiffies.h>
#include <linux/mutex.h>
#include <linux/pm_qos.h>
#include <linux/random.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/workqueue.h>

#include "vcpufreq-shm.h"

struct device;
struct pci_driver;
struct platform_driver;
struct resource;
struct vcpufreq;

/**
 * struct vcpufreq_domain - CPUs whose performance the host sets together
 * @vf:		the device that this domain belongs to
 * @id:		the number that the host gives it in perf_domain
 * @nr_perf:	entries in @table; 1 means that any value up to it can be asked
 * @cpus:	possible CPUs with this number; they form one cpufreq policy
 * @has_opps:	the CPUs' OPPs were added from the device tree
 * @has_power:	the device gives the power of each level
 * @cap:	the host's limit on the policy's maximum
 * @host_cap:	the same in kHz; FREQ_QOS_MAX_DEFAULT_VALUE without one
 * @policy:	the policy, while there is one
 * @limited:	a task that the guest holds down has run
 * @limited_at:	when that was seen last, in jiffies
 * @lock:	of the next three; unused without ceilings
 * @request:	what was written last
 * @page:	CPU whose register has it
 * @renew_at:	when a ceiling is to be written again, in jiffies
 * @em_usable:	those OPPs agree with @table, or there are none and the device
 *		gives power, so an energy model can be made
 * @table:	performance levels in kHz, rising, closed by CPUFREQ_TABLE_END
 * @power:	of each level in microwatts, above 0; only if @has_power
 */
struct vcpufreq_domain {
	const struct vcpufreq *vf;
	u32 id;
	unsigned int nr_perf;
	cpumask_t cpus;
	bool has_opps;
	bool has_power;
	bool em_usable;
	struct freq_qos_request cap;
	s32 host_cap;
	const struct cpufreq_policy *policy;
	bool limited;
	unsigned long limited_at;
	raw_spinlock_t lock;
	u32 request;
	unsigned int page;
	unsigned long renew_at;
	struct cpufreq_frequency_table table[VCPUFREQ_PERFTBL_MAX + 1];
	u32 power[VCPUFREQ_PERFTBL_MAX];
};

/**
 * struct vcpufreq_io - how a way of attaching reaches the registers
 * @regs:	register pages, one per CPU, by CPU number; unless @cells is set
 * @cells:	those pages as memory that the host shares, or NULL
 * @doorbell:	tells the host of a store to @cells
 * @peer:	the host's number at @doorbell
 * @pages:	pages of the guest's memory that the host keeps as those at @regs,
 *		by CPU number, or NULL
 * @size:	bytes at @regs or @cells
 */
struct vcpufreq_io {
	void __iomem *regs;
	__le32 *cells;
	void __iomem *doorbell;
	u32 peer;
	__le32 *pages;
	resource_size_t size;
};

/**
 * struct vcpufreq_steal - what is known of a CPU's steal time
 * @stolen:	all of it at the last look, in ns
 * @busy:	the time of its tasks at the last look, in ns
 * @looked_at:	when that was, by ktime_get_ns()
 * @peak:	the highest share of late, of SCHED_CAPACITY_SCALE; it falls slowly
 * @share:	the share that the scheduler takes from the CPU's capacity
 */
struct vcpufreq_steal {
	u64 stolen;
	u64 busy;
	u64 looked_at;
	u64 peak;
	unsigned int share;
};

/* How often caps and steal time are looked at while a CPU has ticks, on average. */
#define VCPUFREQ_CAPS_INTERVAL	(HZ / 4)

/**
 * struct vcpufreq_caps - what looks at the domains' caps and the CPUs' steal time
 * @vf:		the device that has them
 * @due:	when the next look is due, in jiffies
 * @queue:	where it is done: not on isolated CPUs, nor during suspend
 * @look:	the look
 * @lock:	protects each domain's @cap, and @steal
 * @steal:	of each possible CPU, by CPU number
 */
struct vcpufreq_caps {
	const struct vcpufreq *vf;
	unsigned long due;
	struct workqueue_struct *queue;
	struct work_struct look;
	struct mutex lock; /* of each domain's @cap, and @steal */
	struct vcpufreq_steal *steal;
};

/* With interrupts off, in a tick: what a look does may sleep. */
static inline void vcpufreq_caps_tick(struct vcpufreq_caps *caps)
{
	if (time_before(jiffies, READ_ONCE(caps->due)))
		return;

	/*
	 * Of CPUs that come here at once, one queues it. At random, or two guests that
	 * share CPUs of the host would leave one at the same time, and meet again.
	 */
	WRITE_ONCE(caps->due, jiffies + VCPUFREQ_CAPS_INTERVAL / 2 +
			      get_random_u32_below(VCPUFREQ_CAPS_INTERVAL));
	queue_work(caps->queue, &caps->look);
}

/**
 * struct vcpufreq - one device, as found by a way of attaching
 * @dev:	where messages and allocations go
 * @io:		its registers
 * @any_cpu:	a CPU may ask for a domain that it isn't of
 * @has_caps:	the device tells what the host allows now
 * @has_ceilings: a request may be the most, too
 * @has_pages:	the device takes memory of the guest's
 * @capacity_set: the CPUs' capacities are those of @capacity
 * @caps:	what looks at that, and at steal time; NULL on x86
 * @capacity:	of each possible CPU, 1 to SCHED_CAPACITY_SCALE, by CPU number;
 *		NULL if the device doesn't give them
 * @driver:	the cpufreq driver registered for this device
 * @domain:	the domain of each possible CPU, by CPU number
 */
struct vcpufreq {
	struct device *dev;
	struct vcpufreq_io io;
	bool any_cpu;
	bool has_caps;
	bool has_ceilings;
	bool has_pages;
	bool capacity_set;
	struct vcpufreq_caps *caps;
	u32 *capacity;
	struct cpufreq_driver driver;
	struct vcpufreq_domain **domain;
};

static inline __le32 *vcpufreq_cell(const struct vcpufreq_io *io,
				    unsigned int cpu, unsigned int reg)
{
	return io->cells + (cpu * VCPUFREQ_STRIDE + reg) / sizeof(*io->cells);
}

/* Whether the host keeps @reg in memory that the guest shares; @value gets it. */
static inline bool vcpufreq_read_page(const struct vcpufreq_io *io,
				      unsigned int cpu, unsigned int reg,
				      u32 *value)
{
	const __le32 *page;
	bool known = false;

	if (reg != VCPUFREQ_REG_CUR_PERF && reg != VCPUFREQ_REG_PERF_CAP)
		return false;

	/* vcpufreq_pages_shutdown() waits for the end of this. */
	rcu_read_lock();
	page = READ_ONCE(io->pages);
	if (page) {
		page += cpu * VCPUFREQ_STRIDE / sizeof(*page);
		*value = le32_to_cpu(READ_ONCE(page[VCPUFREQ_REG_CUR_PERF / sizeof(*page)]));
		known = *value != VCPUFREQ_CUR_PERF_UNKNOWN;
		if (known && reg == VCPUFREQ_REG_PERF_CAP)
			*value = le32_to_cpu(READ_ONCE(page[reg / sizeof(*page)]));
	}
	rcu_read_unlock();

	return known;
}

/*
 * The only two places that reach a register. Relaxed, because no memory of
 * the guest is ordered against these registers.
 */
static inline u32 vcpufreq_read(const struct vcpufreq *vf, unsigned int cpu,
				unsigned int reg)
{
	const struct vcpufreq_io *io = &vf->io;
	u32 value;

	if (vcpufreq_read_page(io, cpu, reg, &value))
		return value;

	if (io->cells)
		return le32_to_cpu(READ_ONCE(*vcpufreq_cell(io, cpu, reg)));

	return readl_relaxed(io->regs + cpu * VCPUFREQ_STRIDE + reg);
}

/*
 * A store to a cell reaches the host without a trap, so the doorbell has to
 * follow. Not relaxed: the host must see the store when the bell rings.
 */
static inline void vcpufreq_write(const struct vcpufreq *vf, unsigned int cpu,
				  unsigned int reg, u32 value)
{
	const struct vcpufreq_io *io = &vf->io;

	if (io->cells) {
		WRITE_ONCE(*vcpufreq_cell(io, cpu, reg), cpu_to_le32(value));
		writel(VCPUFREQ_SHM_RING(io->peer, cpu), io->doorbell);
		return;
	}

	writel_relaxed(value, io->regs + cpu * VCPUFREQ_STRIDE + reg);
}

/* Highest performance of a CPU in @domain, in kHz; checked to be above 0. */
static inline u32 vcpufreq_perf_max(const struct vcpufreq_domain *domain)
{
	return domain->table[domain->nr_perf - 1].frequency;
}

static inline bool vcpufreq_has_table(const struct vcpufreq_domain *domain)
{
	return domain->nr_perf > 1;
}

extern struct platform_driver vcpufreq_of_driver;
extern struct pci_driver vcpufreq_pci_driver;

int vcpufreq_map_shared(struct device *dev, const struct resource *memory,
			struct vcpufreq_io *io);

struct vcpufreq *vcpufreq_register(struct device *dev,
				   const struct vcpufreq_io *io);
void vcpufreq_unregister(struct vcpufreq *vf);

int vcpufreq_read_host(struct vcpufreq *vf);

void vcpufreq_pages_share(struct vcpufreq *vf);
void vcpufreq_pages_unshare(struct vcpufreq *vf);
void vcpufreq_pages_shutdown(struct vcpufreq *vf);

void vcpufreq_ask(struct vcpufreq_domain *domain, unsigned int cpu, u32 perf);

#ifdef CONFIG_GENERIC_ARCH_TOPOLOGY
void vcpufreq_ceiling_tick(struct vcpufreq_domain *domain);

void vcpufreq_scale_start(struct vcpufreq_domain *domain);
void vcpufreq_scale_stop(const struct vcpufreq_domain *domain);

int vcpufreq_caps_init(struct vcpufreq *vf);
void vcpufreq_caps_exit(struct vcpufreq *vf);
void vcpufreq_cap_start(struct vcpufreq_domain *domain,
			struct cpufreq_policy *policy);
void vcpufreq_cap_stop(struct vcpufreq_domain *domain);

void vcpufreq_steal_start(struct vcpufreq_steal *steal, unsigned int cpu);
void vcpufreq_steal_look(struct vcpufreq_steal *steal, unsigned int cpu, u32 cap);
void vcpufreq_steal_stop(struct vcpufreq_steal *steal, unsigned int cpu);

void vcpufreq_capacity_set(struct vcpufreq *vf);
void vcpufreq_capacity_restore(struct vcpufreq *vf);
#else
/* As on x86: the architecture alone sets how fast and how big a CPU is. */
static inline void vcpufreq_scale_start(struct vcpufreq_domain *domain) {}
static inline void vcpufreq_scale_stop(const struct vcpufreq_domain *domain) {}

/* Nor does its scheduler know what a lower maximum takes from a CPU. */
static inline int vcpufreq_caps_init(struct vcpufreq *vf) { return 0; }
static inline void vcpufreq_caps_exit(struct vcpufreq *vf) {}
static inline void vcpufreq_cap_start(struct vcpufreq_domain *domain,
				      struct cpufreq_policy *policy) {}
static inline void vcpufreq_cap_stop(struct vcpufreq_domain *domain) {}

static inline void vcpufreq_capacity_set(struct vcpufreq *vf) {}
static inline void vcpufreq_capacity_restore(struct vcpufreq *vf) {}
#endif

void vcpufreq_em_init(struct vcpufreq_domain *domain);
void vcpufreq_em_register(struct cpufreq_policy *policy);
void vcpufreq_em_exit(struct vcpufreq_domain *domain);

#endif /* VCPUFREQ_H */
