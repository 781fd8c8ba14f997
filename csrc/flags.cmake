option(KVELL_WERROR "Compiler warnings in Kvell's own units are errors" OFF)
option(KVELL_SANITIZE "Build with AddressSanitizer and UndefinedBehaviorSanitizer" OFF)
option(KVELL_EMULATE "Run kernels for AVX512_BF16 and AMX without these instructions, slowly" OFF)

# Flags of all of Kvell's own units; nanobind's are its own affair. Sanitized units are
# compiled at -O1: kernels with both sanitizers take gcc many minutes at -O3.
function(kvell_set_flags name level)
  target_compile_options(${name} PRIVATE ${level} -Wall -Wextra $<$<BOOL:${KVELL_WERROR}>:-Werror>)
  target_include_directories(${name} PRIVATE "${CMAKE_SOURCE_DIR}/csrc")
  if(KVELL_EMULATE)
    target_compile_definitions(${name} PRIVATE KVELL_EMULATE=1)
  endif()
  if(KVELL_SANITIZE)
    set(sanitizers -fsanitize=address,undefined -fno-sanitize-recover=undefined)
    target_compile_options(${name} PRIVATE ${sanitizers} -fno-omit-frame-pointer -g1 -O1)
    target_link_options(${name} PRIVATE ${sanitizers})
  endif()
endfunction()

# An extension module; warnings in nanobind's and Python's headers are not ours.
function(kvell_add_extension name destination level)
  set(names "")
  if(KVELL_SANITIZE)
    set(names NOSTRIP)  # for the sanitizers' reports
  endif()
  nanobind_add_module(${name} NB_STATIC NOMINSIZE NB_SUPPRESS_WARNINGS ${names} ${ARGN})
  # One unit for nanobind's own: most of each is its headers.
  set_target_properties(nanobind-static PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  kvell_set_flags(${name} ${level})
  install(TARGETS ${name} LIBRARY DESTINATION ${destination})
endfunction()
