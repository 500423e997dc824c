// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The way of set_perf, as docs/architecture.md has it: from KVM_RUN's return, or the worker's wake-up, to
//! the write of the clamp. What counts is the call stack at that write.
//! - each function calls the next
//! - by `exit` it has at most 8 files and 16 functions, by `ioeventfd` at most 7 files

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use syn::visit::{self, Visit};

/// A file, a function of it, and which function that calls.
type Step = (&'static str, &'static str, &'static str);

/// A parameter of `Domain::apply_pending`, which the next step makes.
const CLOSURE: &str = "apply";

const FROM_VCPU: &[Step] = &[
    ("vmm/vm/src/vcpu.rs", "run_vcpu", "handle_exit"),
    ("vmm/vm/src/vcpu.rs", "handle_exit", "write"),
    ("vmm/vm/src/bus.rs", "write", "write"),
    ("vmm-device/bridge/src/mmio_device.rs", "write", "write"),
    ("vmm-device/bridge/src/mmio_device.rs", "write", "write_by"),
    ("vmm-device/device/src/mmio.rs", "write_by", "write_by"),
];

const FROM_WORKER: &[Step] = &[
    ("vmm-device/bridge/src/ioeventfd/worker.rs", "run", "answer"),
    (
        "vmm-device/bridge/src/ioeventfd/worker.rs",
        "answer",
        "drain_one",
    ),
    (
        "vmm-device/bridge/src/ioeventfd/pending_writes.rs",
        "drain_one",
        "drain_locked",
    ),
    (
        "vmm-device/bridge/src/ioeventfd/pending_writes.rs",
        "drain_locked",
        "drain",
    ),
    (
        "vmm-device/bridge/src/ioeventfd/domain_writes.rs",
        "drain",
        "carry_out",
    ),
    (
        "vmm-device/bridge/src/ioeventfd/domain_writes.rs",
        "carry_out",
        "write",
    ),
    ("vmm-device/device/src/device.rs", "write", "write_by"),
];

const TO_CLAMP: &[Step] = &[
    (
        "vmm-device/device/src/device.rs",
        "write_by",
        "limited_request",
    ),
    (
        "vmm-device/device/src/device.rs",
        "limited_request",
        "apply_pending",
    ),
    (
        "vmm-device/device/src/device.rs",
        "apply_pending",
        "apply_pending",
    ),
    ("vmm-device/device/src/domain.rs", "apply_pending", CLOSURE),
    (
        "vmm-device/device/src/device.rs",
        "apply_pending",
        "enforce",
    ),
    ("vmm-device/device/src/device.rs", "enforce", "apply"),
    ("vmm-device/host/src/choice.rs", "apply", "apply"),
    ("vmm-device/host/src/cgroup_actuator.rs", "apply", "set"),
    ("vmm-device/host/src/cgroup_actuator.rs", "set", "set"),
    (
        "vmm-device/host/src/cgroup_actuator.rs",
        "set",
        "write_all_at",
    ),
];

#[test]
fn by_exit() {
    let (files, functions) = walk(&[FROM_VCPU, TO_CLAMP].concat());
    assert!(
        files <= 8 && functions <= 16,
        "{files} files, {functions} functions"
    );
}

#[test]
fn by_ioeventfd() {
    let (files, _) = walk(&[FROM_WORKER, TO_CLAMP].concat());
    assert!(files <= 7, "{files} files");
}

/// Checks each step of a way; its files and functions.
fn walk(way: &[Step]) -> (usize, usize) {
    let page = read("docs/architecture.md");
    for pair in way.windows(2) {
        let ((file, function, next), (_, following, _)) = (pair[0], pair[1]);
        let is_closure = file.ends_with("domain.rs") && next == CLOSURE;
        assert!(
            next == following || is_closure,
            "{file}: {function} calls {next}"
        );
    }
    for (file, function, next) in way {
        let mut calls = Calls {
            function,
            next,
            found: false,
        };
        println!("{file}: {function} calls {next}");
        calls.visit_file(&syn::parse_file(&read(file)).expect("Rust"));
        assert!(calls.found, "{file}: {function} calls no {next}");
        let name = file.trim_start_matches("vmm-device/");
        let name = name.trim_start_matches("device/src/");
        let name = name.trim_start_matches("bridge/src/ioeventfd/");
        assert!(
            page.contains(&format!("`{name}`")),
            "docs/architecture.md lacks {name}"
        );
    }
    let files: BTreeSet<&str> = way.iter().map(|(file, _, _)| *file).collect();
    (files.len(), way.len())
}

fn read(file: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    fs::read_to_string(root.join(file)).expect(file)
}

/// Whether a function of this name calls another one.
struct Calls<'a> {
    function: &'a str,
    next: &'a str,
    found: bool,
}

impl Calls<'_> {
    fn look(&mut self, name: &syn::Ident, block: &syn::Block) {
        if name == self.function {
            let mut names = Names(BTreeSet::new());
            names.visit_block(block);
            self.found |= names.0.contains(self.next);
        }
    }
}

impl<'ast> Visit<'ast> for Calls<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.look(&item.sig.ident, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.look(&item.sig.ident, &item.block);
        visit::visit_impl_item_fn(self, item);
    }
}

/// What a block calls.
struct Names(BTreeSet<String>);

impl<'ast> Visit<'ast> for Names {
    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.0.insert(call.method.to_string());
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        if let syn::Expr::Path(path) = &*call.func {
            let last = path.path.segments.last();
            self.0.extend(last.map(|last| last.ident.to_string()));
        }
        visit::visit_expr_call(self, call);
    }
}
