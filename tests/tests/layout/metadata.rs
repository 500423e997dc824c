// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What cargo knows of this workspace's packages.

use std::process::Command;

use serde_json::Value;

/// This workspace's packages.
pub fn packages() -> Vec<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let words = ["metadata", "--no-deps", "--offline", "--format-version=1"];
    let output = Command::new(cargo).args(words).output().expect("cargo");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    metadata["packages"].as_array().expect("packages").clone()
}

/// The name of a package or of a dependency.
pub fn name(value: &Value) -> Option<&str> {
    value["name"].as_str()
}
