//! The builder style of all structs of options: a method for each field, of the same name.

/// Implements for a struct of options a method for each field, which sets the field and returns the struct.
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
