// SPDX-License-Identifier: GPL-2.0-only
/*
 * Attaches the driver to a device-tree node of the binding
 * "qemu,virtual-cpufreq" (Linux 6.13), or of VCPUFREQ_SHM_COMPATIBLE: its first
 * region is memory that the host shares, its second one has the doorbell.
 */

#include <linux/err.h>
#include <linux/mod_devicetable.h>
#include <linux/module.h>
#include <linux/platform_device.h>
#include <linux/property.h>

#include "vcpufreq.h"

typedef int (*vcpufreq_map_fn)(struct platform_device *pdev,
			       struct vcpufreq_io *io);

static int vcpufreq_map_registers(struct platform_device *pdev,
				  struct vcpufreq_io *io)
{
	struct resource *res;

	io->regs = devm_platform_get_and_ioremap_resource(pdev, 0, &res);
	if (IS_ERR(io->regs))
		return dev_err_probe(&pdev->dev, PTR_ERR(io->regs),
				     "cannot map the register region\n");

	if (!IS_ALIGNED(res->start, VCPUFREQ_STRIDE))
		return dev_err_probe(&pdev->dev, -EINVAL,
				     "register region at %pap isn't aligned to %u\n",
				     &res->start, VCPUFREQ_STRIDE);

	io->size = resource_size(res);

	return 0;
}

static int vcpufreq_map_shm(struct platform_device *pdev,
			    struct vcpufreq_io *io)
{
	struct device *dev = &pdev->dev;
	struct resource *memory, *doorbell;
	void __iomem *page;
	int ret;

	memory = platform_get_resource(pdev, IORESOURCE_MEM, 0);
	if (!memory)
		return dev_err_probe(dev, -EINVAL, "no memory region\n");

	if (!devm_request_mem_region(dev, memory->start, resource_size(memory),
				     dev_name(dev)))
		return dev_err_probe(dev, -EBUSY, "%pR is in use\n", memory);

	ret = vcpufreq_map_shared(dev, memory, io);
	if (ret == -ENODEV)
		return dev_err_probe(dev, ret, "no host shares %pR\n", memory);
	if (ret)
		return ret;

	page = devm_platform_get_and_ioremap_resource(pdev, 1, &doorbell);
	if (IS_ERR(page))
		return dev_err_probe(dev, PTR_ERR(page),
				     "cannot map the doorbell\n");

	if (resource_size(doorbell) < VCPUFREQ_SHM_DOORBELL + VCPUFREQ_REG_WIDTH)
		return dev_err_probe(dev, -EINVAL, "%pR has no doorbell\n",
				     doorbell);

	io->doorbell = page + VCPUFREQ_SHM_DOORBELL;

	return 0;
}

static int vcpufreq_of_probe(struct platform_device *pdev)
{
	vcpufreq_map_fn map = device_get_match_data(&pdev->dev);
	struct vcpufreq_io io = {};
	struct vcpufreq *vf;
	int ret;

	/* Bound by name, to a device that isn't of the tree. */
	if (!map)
		return -ENODEV;

	ret = map(pdev, &io);
	if (ret)
		return ret;

	vf = vcpufreq_register(&pdev->dev, &io);
	if (IS_ERR(vf))
		return PTR_ERR(vf);

	platform_set_drvdata(pdev, vf);

	return 0;
}

static void vcpufreq_of_remove(struct platform_device *pdev)
{
	vcpufreq_unregister(platform_get_drvdata(pdev));
}

/* Before kexec: the next kernel knows of no memory that the host can read. */
static void vcpufreq_of_shutdown(struct platform_device *pdev)
{
	vcpufreq_pages_shutdown(platform_get_drvdata(pdev));
}

static const struct of_device_id vcpufreq_of_match[] = {
	{ .compatible = "qemu,virtual-cpufreq", .data = vcpufreq_map_registers },
	{ .compatible = VCPUFREQ_SHM_COMPATIBLE, .data = vcpufreq_map_shm },
	{ }
};
MODULE_DEVICE_TABLE(of, vcpufreq_of_match);

struct platform_driver vcpufreq_of_driver = {
	.probe = vcpufreq_of_probe,
	.remove = vcpufreq_of_remove,
	.shutdown = vcpufreq_of_shutdown,
	.driver = {
		.name = "vcpufreq-guest",
		.of_match_table = vcpufreq_of_match,
	},
};
