# SPDX-License-Identifier: GPL-2.0-only
#
# What the Makefiles of all kernel modules share. Each sets SOURCES, and ABI where
# it has headers of abi/, and includes this; "make dist" copies it along.
#
# make                      build the module for the running kernel
# make KDIR=... [MO=...]    for the kernel with these headers, into folder MO
# make check CHECKPATCH=... sparse and W=1 with warnings as errors, checkpatch
# make dist [DIST=...]      a self-contained source tree, as DKMS wants it
# make dkms-add             that tree into /usr/src, known to DKMS
#
# To cross-build, give ARCH=arm64 CROSS_COMPILE=aarch64-linux-gnu- too.

RULES := $(lastword $(MAKEFILE_LIST))
name = $(shell sed -n 's/^PACKAGE_NAME="\(.*\)"$$/\1/p' dkms.conf)
version = $(shell sed -n 's/^PACKAGE_VERSION="\(.*\)"$$/\1/p' dkms.conf)
KDIR ?= /lib/modules/$(shell uname -r)/build
DIST ?= out/$(name)-$(version)
CHECKPATCH ?= $(KDIR)/scripts/checkpatch.pl

# MO, a folder for what is built, is known to kernels from 6.13 on.
# The header packages have no scripts/checker-valid.sh, without which C=2 turns
# itself off; KBUILD_CHECKSRC on the command line insists.
kbuild = $(MAKE) -C $(KDIR) M=$(CURDIR) $(if $(MO),MO=$(MO))
strict = W=1 KCFLAGS=-Werror
compat = $(abspath $(dir $(RULES))guest-driver/tests/sparse-compat.h)
sparse = KBUILD_CHECKSRC=2 CF="-Wsparse-error -include $(compat)"

.PHONY: modules check clean dist dkms-add

modules:
	$(if $(MO),mkdir -p $(MO))
	$(kbuild) modules

check:
	$(if $(MO),mkdir -p $(MO))
	$(kbuild) $(strict) $(sparse) modules
	perl $(CHECKPATCH) --no-tree --strict --terse --show-types --file $(SOURCES) \
		$(ABI) $(TESTS)

clean:
	$(kbuild) clean

dist:
	mkdir -p $(DIST) $(if $(ABI),$(DIST)/abi)
	cp $(SOURCES) Kbuild Makefile $(RULES) dkms.conf README.md $(DIST)/
	$(if $(ABI),cp $(ABI) $(DIST)/abi/)

dkms-add: DIST = /usr/src/$(name)-$(version)
dkms-add: dist
	dkms add -m $(name) -v $(version)
