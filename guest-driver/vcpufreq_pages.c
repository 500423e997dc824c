// SPDX-License-Identifier: GPL-2.0-only
/*
 * Pages of the guest's own memory in which the host keeps cur_perf and perf_cap:
 * a read of these is a load then. For a protected guest (pKVM): the host has no
 * memory that the guest could read without an exit, and can't read or write
 * what the guest doesn't share.
 *
 * The guest doesn't trust the host. It shares pages that hold nothing else, one
 * for each CPU, and loads two words of each, whose values are bounded where
 * they are used as those of the registers. A host can delay the guest by them,
 * no more.
 *
 * Without these pages each read is one of a register: when the kernel can't
 * share pages (CONFIG_ARM_PKVM_GUEST), or when the host stops updating them.
 */

#include <linux/cpumask.h>
#include <linux/device.h>
#include <linux/gfp.h>
#include <linux/io.h>
#include <linux/limits.h>
#include <linux/mm.h>
#include <linux/rcupdate.h>
#include <linux/set_memory.h>
#include <linux/string.h>

#include "vcpufreq.h"

static size_t vcpufreq_pages_size(void)
{
	unsigned int pages = cpumask_last(cpu_possible_mask) + 1;

	return PAGE_ALIGN((size_t)pages * VCPUFREQ_STRIDE);
}

/* What can't be made private again stays allocated: nothing of the guest's may come there. */
static void vcpufreq_free_pages(struct vcpufreq *vf, void *pages)
{
	size_t size = vcpufreq_pages_size();
	int ret;

	ret = set_memory_encrypted((unsigned long)pages, size >> PAGE_SHIFT);
	if (ret) {
		dev_warn(vf->dev, "%zu bytes stay shared with the host: %d\n",
			 size, ret);
		return;
	}

	free_pages_exact(pages, size);
}

/**
 * vcpufreq_pages_share() - share pages into which the host writes cur_perf and perf_cap
 * @vf:		device whose registers are mapped; gets the pages if it takes some
 *
 * Without pages the registers are read, so no error is fatal.
 */
void vcpufreq_pages_share(struct vcpufreq *vf)
{
	size_t size = vcpufreq_pages_size();
	phys_addr_t page;
	void *pages;
	int ret;

	if (vf->io.cells || !vf->has_pages)
		return;

	pages = alloc_pages_exact(size, GFP_KERNEL);
	if (!pages)
		return;

	/* VCPUFREQ_CUR_PERF_UNKNOWN everywhere, until the host stores to it. */
	memset(pages, 0xff, size);
	ret = set_memory_decrypted((unsigned long)pages, size >> PAGE_SHIFT);
	page = virt_to_phys(pages) >> VCPUFREQ_SHARED_PAGE_SHIFT;
	if (ret || page > U32_MAX) {
		dev_warn(vf->dev, "cannot share memory with the host: %d\n", ret);
		vcpufreq_free_pages(vf, pages);
		return;
	}

	vcpufreq_write(vf, 0, VCPUFREQ_REG_SHARED_PAGES, page);
	vf->io.pages = pages;
}

/**
 * vcpufreq_pages_unshare() - take the pages back
 * @vf:		the device; no CPU reads its registers meanwhile
 */
void vcpufreq_pages_unshare(struct vcpufreq *vf)
{
	void *pages = vf->io.pages;

	if (!pages)
		return;

	vf->io.pages = NULL;
	vcpufreq_write(vf, 0, VCPUFREQ_REG_SHARED_PAGES, 0);
	vcpufreq_free_pages(vf, pages);
}

/**
 * vcpufreq_pages_shutdown() - make the pages private before another kernel runs
 * @vf:		the device, whose registers may be read meanwhile
 */
void vcpufreq_pages_shutdown(struct vcpufreq *vf)
{
	void *pages = vf->io.pages;

	if (!pages)
		return;

	/* Where a page that becomes private is unmapped meanwhile, a load would fault. */
	WRITE_ONCE(vf->io.pages, NULL);
	synchronize_rcu();

	vcpufreq_write(vf, 0, VCPUFREQ_REG_SHARED_PAGES, 0);
	set_memory_encrypted((unsigned long)pages,
			     vcpufreq_pages_size() >> PAGE_SHIFT);
}
