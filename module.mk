# SPDX-License-Identifier: GPL-2.0-only
#
# What the Makefiles of all kernel modules share. Each sets SOURCES, ABI where it
# has headers of abi/, and NEEDS, options of the kernel without which the module
# cannot work, and includes this; "make dist" copies it along.
#
# make                      build the module for the running kernel
# make KDIR=... [MO=...]    for the kernel with these headers, into folder MO
# make check CHECKPATCH=... sparse and W=1 with warnings as errors, checkpatch
# make dist [DIST=...]      a self-contained source tree, as DKMS wants it
# make dkms-add             that tree into /usr/src, known to DKMS
# make dkms                 what DKMS runs there: the module, or an empty one
#
# To cross-build, give ARCH=arm64 CROSS_COMPILE=aarch64-linux-gnu- too.

RULES := $(lastword $(MAKEFILE_LIST))
name = $(shell sed -n 's/^PACKAGE_NAME="\(.*\)"$$/\1/p' dkms.conf)
version = $(shell sed -n 's/^PACKAGE_VERSION="\(.*\)"$$/\1/p' dkms.conf)
built = $(shell sed -n 's/^BUILT_MODULE_NAME\[0\]="\(.*\)"$$/\1/p' dkms.conf)
KDIR ?= /lib/modules/$(shell uname -r)/build
DIST ?= out/$(name)-$(version)
CHECKPATCH ?= $(KDIR)/scripts/checkpatch.pl

# MO, a folder for what is built, is known to kernels from 6.13 on.
# The header packages have no scripts/checker-valid.sh, without which C=2 turns
# itself off; KBUILD_CHECKSRC on the command line insists.
kbuild = $(MAKE) -C $(KDIR) M=$(CURDIR) $(if $(MO),MO=$(MO))
strict ?= W=1 KCFLAGS=-Werror
compat = $(abspath $(dir $(RULES))guest-driver/tests/sparse-compat.h)
sparse = KBUILD_CHECKSRC=2 CF="-Wsparse-error -include $(compat)"

# In a package beside this file.
EMPTY := $(abspath $(firstword $(wildcard $(addprefix $(dir $(RULES)),empty guest-driver/empty))))
empty = $(MAKE) -C $(KDIR) M=$(EMPTY) $(if $(MO),MO=$(MO)/empty) EMPTY_NAME=$(built) \
	EMPTY_REASON="$(1)" $(2) modules
# "Linux 6.12 and CONFIG_KVM"
lacks = $(shell cd $(KDIR)/include/config && { \
	printf '%s\n' 6.12 "$$(cat kernel.release)" | sort -CV || echo Linux 6.12; \
	for option in $(NEEDS); do \
		grep -q "^CONFIG_$$option=" auto.conf || echo "CONFIG_$$option"; \
	done; } | paste -s | sed 's/\t/ and /g')

.PHONY: modules check clean dist dkms-add dkms

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
	mkdir -p $(DIST)/empty $(if $(ABI),$(DIST)/abi)
	cp $(SOURCES) Kbuild Makefile $(RULES) dkms.conf README.md $(DIST)/
	cp $(EMPTY)/Kbuild $(EMPTY)/empty.c $(DIST)/empty/
	$(if $(ABI),cp $(ABI) $(DIST)/abi/)

dkms-add: DIST = /usr/src/$(name)-$(version)
dkms-add: dist
	dkms add -m $(name) -v $(version)

# A module that DKMS cannot build stops the installation of a kernel: apt ends with 100,
# the kernel stays half-configured, and later hooks do not run. dkms 3.0.10 (Debian 12)
# takes a mismatch of BUILD_EXCLUSIVE for such a failure. So DKMS always gets a module.
dkms:
	$(if $(lacks),$(call make-empty,needs $(lacks)),$(MAKE) modules || { $(call make-empty,$(broken)); })

broken = did not build for this kernel: see make.log below /var/lib/dkms/$(name)/$(version)
make-empty = $(call empty,$(1)) && cp $(EMPTY)/$(built).ko .
