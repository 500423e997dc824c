// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A device tree node as data, and its two forms: blob and source.

use std::fmt::{self, Write};

use vm_fdt::{FdtWriter, FdtWriterResult};

/// A node with everything below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    name: String,
    target: Option<NodeTarget>,
    properties: Vec<(&'static str, PropertyValue)>,
    children: Vec<Node>,
}

/// A node that others refer to: by label in source, by phandle in a blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeTarget {
    /// The name in source; unique in the tree.
    pub label: String,
    /// The number in a blob; unique in the tree.
    pub phandle: u32,
}

/// A property's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PropertyValue {
    /// Its being there is all.
    Flag,
    /// A string.
    Text(&'static str),
    /// One cell, shown in decimal.
    Number(u32),
    /// Two cells that are one number, shown in decimal.
    Wide(u64),
    /// Addresses and sizes of two cells each, shown in hexadecimal.
    Addresses(Vec<u64>),
    /// Another node.
    Reference(NodeTarget),
}

impl Node {
    pub(crate) fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            target: None,
            properties: Vec::new(),
            children: Vec::new(),
        }
    }

    /// Lets others refer to this node.
    pub(crate) fn target(mut self, target: NodeTarget) -> Self {
        self.target = Some(target);
        self
    }

    pub(crate) fn with(mut self, name: &'static str, value: PropertyValue) -> Self {
        self.properties.push((name, value));
        self
    }

    /// As [`Node::with`], or nothing.
    pub(crate) fn with_some(self, name: &'static str, value: Option<PropertyValue>) -> Self {
        match value {
            Some(value) => self.with(name, value),
            None => self,
        }
    }

    pub(crate) fn children(mut self, children: impl IntoIterator<Item = Node>) -> Self {
        self.children.extend(children);
        self
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Writes the node where the writer is.
    pub(crate) fn write(&self, fdt: &mut FdtWriter) -> FdtWriterResult<()> {
        let open = fdt.begin_node(&self.name)?;
        self.write_properties(fdt)?;
        for child in &self.children {
            child.write(fdt)?;
        }
        fdt.end_node(open)
    }

    /// Writes the properties alone, the phandle with them.
    pub(crate) fn write_properties(&self, fdt: &mut FdtWriter) -> FdtWriterResult<()> {
        for (name, value) in &self.properties {
            value.write(name, fdt)?;
        }
        match &self.target {
            Some(target) => fdt.property_phandle(target.phandle),
            None => Ok(()),
        }
    }

    /// Prints the node as source, `depth` tabs in.
    fn print(&self, out: &mut impl Write, depth: usize) -> fmt::Result {
        let tabs = "\t".repeat(depth);
        let name = if self.name.is_empty() {
            "/"
        } else {
            &self.name
        };
        match &self.target {
            Some(target) => writeln!(out, "{tabs}{}: {name} {{", target.label)?,
            None => writeln!(out, "{tabs}{name} {{")?,
        }
        for (name, value) in &self.properties {
            writeln!(out, "{tabs}\t{name}{value};")?;
        }
        for (index, child) in self.children.iter().enumerate() {
            if index != 0 || !self.properties.is_empty() {
                writeln!(out)?;
            }
            child.print(out, depth + 1)?;
        }
        writeln!(out, "{tabs}}};")
    }
}

/// The source form. Phandles are left to the compiler: they would clash where
/// the text is included into another tree.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.print(f, 0)
    }
}

impl PropertyValue {
    fn write(&self, name: &str, fdt: &mut FdtWriter) -> FdtWriterResult<()> {
        match self {
            Self::Flag => fdt.property_null(name),
            Self::Text(text) => fdt.property_string(name, text),
            Self::Number(number) => fdt.property_u32(name, *number),
            Self::Wide(number) => fdt.property_u64(name, *number),
            Self::Addresses(values) => fdt.property_array_u64(name, values),
            Self::Reference(target) => fdt.property_u32(name, target.phandle),
        }
    }
}

/// Everything after the property's name: ` = <5>`, or nothing for a flag.
impl fmt::Display for PropertyValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => Ok(()),
            // Only fixed strings get here, none of them with a quote.
            Self::Text(text) => write!(f, " = \"{text}\""),
            Self::Number(number) => write!(f, " = <{number}>"),
            Self::Wide(number) => write!(f, " = /bits/ 64 <{number}>"),
            Self::Addresses(values) => {
                let cells: Vec<String> = values
                    .iter()
                    .map(|value| format!("{:#x} {:#x}", value >> 32, value & 0xffff_ffff))
                    .collect();
                write!(f, " = <{}>", cells.join(" "))
            }
            Self::Reference(target) => write!(f, " = <&{}>", target.label),
        }
    }
}
