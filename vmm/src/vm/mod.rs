// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The virtual machine: KVM, guest memory, boot, run loop, bus and console.
