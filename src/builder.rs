//! One builder style for everything with options: a method named after each field.

/// Adds to a struct of options a method for each field, which sets it and returns the struct.
macro_rules! builder {
    ($options:ident { $($field:ident: $kind:ty),* $(,)? }) => {
        impl $options {$(
            #[doc = concat!("Sets the field `", stringify!($field), "`.")]
            #[must_use]
            pub fn $field(self, $field: $kind) -> Self {
                Self { $field, ..self }
            }
        )*}
    };
}

pub(crate) use builder;
