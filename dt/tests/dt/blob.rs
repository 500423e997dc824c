// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reads a flattened device tree (devicetree specification, chapter 5).

use std::collections::{BTreeMap, HashMap};

/// Properties that refer to other nodes.
const REFERENCES: [&str; 3] = ["cpu", "cpu-idle-states", "operating-points-v2"];

/// Every property of a tree by its node's path and its name; `""` is in each
/// node, so that a node without properties is there too.
pub type Tree = BTreeMap<String, BTreeMap<String, Vec<u8>>>;

/// A tree as it is.
pub fn read(blob: &[u8]) -> Tree {
    read_part(blob, |_| true)
}

/// A tree with those nodes below the root whose names are wanted, and all below these.
pub fn read_part(blob: &[u8], wanted: impl Fn(&str) -> bool) -> Tree {
    assert_eq!(word(blob, 0), 0xd00d_feed, "magic");
    let mut at = offset(blob, 8);
    let strings = offset(blob, 12);
    let mut path: Vec<String> = Vec::new();
    let mut tree = Tree::new();
    // Nodes that are open, from one on that isn't wanted.
    let mut left_out = 0;
    loop {
        let token = word(blob, at);
        at += 4;
        match token {
            1 => {
                let name = text(blob, at);
                at += (name.len() + 4) & !3;
                if left_out > 0 || path.len() == 1 && !wanted(&name) {
                    left_out += 1;
                    continue;
                }
                path.push(name);
                tree.insert(path.join("/"), BTreeMap::from([(String::new(), vec![])]));
            }
            2 if left_out > 0 => left_out -= 1,
            2 => drop(path.pop().expect("a node is open")),
            3 => {
                let len = offset(blob, at);
                let start = at + 8;
                let name_at = strings + offset(blob, at + 4);
                at = start + ((len + 3) & !3);
                if left_out > 0 {
                    continue;
                }
                let name = text(blob, name_at);
                let value = blob[start..start + len].to_vec();
                let node = tree
                    .get_mut(&path.join("/"))
                    .expect("properties are in a node");
                assert!(node.insert(name, value).is_none(), "a property twice");
            }
            9 => return tree,
            other => panic!("token {other}"),
        }
    }
}

/// A tree with paths in place of phandles, to compare trees in which these
/// were numbered differently.
pub fn read_resolved(blob: &[u8]) -> Tree {
    let mut tree = read(blob);
    let mut paths = HashMap::new();
    for (path, node) in &mut tree {
        if let Some(phandle) = node.remove("phandle") {
            let other = paths.insert(phandle, path.clone());
            assert_eq!(other, None, "a phandle twice");
        }
    }
    for node in tree.values_mut() {
        for (_, value) in node
            .iter_mut()
            .filter(|(name, _)| REFERENCES.contains(&name.as_str()))
        {
            *value = paths[value].clone().into_bytes();
        }
    }
    tree
}

/// A property of one cell.
pub fn cell(tree: &Tree, path: &str, name: &str) -> u32 {
    let value = &tree[path][name];
    assert_eq!(value.len(), 4, "{path}: {name} is one cell");
    word(value, 0)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn offset(bytes: &[u8], at: usize) -> usize {
    usize::try_from(word(bytes, at)).unwrap()
}

fn text(bytes: &[u8], at: usize) -> String {
    let end = bytes[at..].iter().position(|&byte| byte == 0).unwrap();
    String::from_utf8(bytes[at..at + end].to_vec()).unwrap()
}
