// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Records with fields that this version doesn't know.

use serde::{Serialize, de::DeserializeOwned, de::Error as _};
use serde_json::Value;

/// Reads a record that has no field which this version doesn't write: such a field may be a condition
/// of the change. Serde could refuse it too, but then what is known of the record could not be read.
///
/// # Errors
/// As [`serde_json::from_str`], and the first field that is unknown.
pub fn read_strictly<T: DeserializeOwned + Serialize>(text: &str) -> serde_json::Result<T> {
    let record: T = serde_json::from_str(text)?;
    let written: Value = serde_json::from_str(text)?;
    let known = serde_json::to_value(&record)?;
    match unknown(&written, &known) {
        Some(field) => Err(serde_json::Error::custom(format!(
            "unknown field `{field}`"
        ))),
        None => Ok(record),
    }
}

/// A field with a value that isn't in what is known of it.
fn unknown<'a>(written: &'a Value, known: &Value) -> Option<&'a str> {
    match (written, known) {
        (Value::Object(written), Value::Object(known)) => {
            written
                .iter()
                .find_map(|(name, value)| match known.get(name) {
                    Some(known) => unknown(value, known),
                    None => (!value.is_null()).then_some(&**name),
                })
        }
        (Value::Array(written), Value::Array(known)) => {
            let mut pairs = written.iter().zip(known);
            pairs.find_map(|(written, known)| unknown(written, known))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    //! Promise: a field that is unknown at any depth is an error, and one that says nothing is none.
    use super::*;
    use crate::undo::{JournalEntry, OldValue};

    const FILE: &str = r#"{"target":{"kind":"file","path":"/a","format":"text"},"old":"1"}"#;

    #[test]
    fn an_unknown_field_is_an_error_at_any_depth() {
        let value: OldValue = read_strictly(FILE).unwrap();
        let entry = format!(r#"[{{"file":{FILE}}}]"#);
        let entries: Vec<JournalEntry> = read_strictly(&entry).unwrap();
        assert_eq!(entries, [JournalEntry::File(value)]);
        for with in [
            entry.replace("\"old\"", "\"more\":1,\"old\""),
            entry.replace("\"path\"", "\"more\":[],\"path\""),
        ] {
            let why = read_strictly::<Vec<JournalEntry>>(&with).unwrap_err();
            assert_eq!(why.to_string(), "unknown field `more`", "{with}");
        }
    }

    #[test]
    fn an_unknown_field_without_a_value_is_none() {
        let with = FILE.replace("\"old\"", "\"more\":null,\"old\"");
        read_strictly::<OldValue>(&with).unwrap();
    }
}
