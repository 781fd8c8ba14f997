include(CheckCXXCompilerFlag)
find_package(OpenMP)

# Flags and libraries of everything that computes.
function(kvell_set_up name)
  target_compile_options(${name} PRIVATE -Wno-psabi)
  if(OpenMP_CXX_FOUND)
    target_link_libraries(${name} PRIVATE OpenMP::OpenMP_CXX)
  endif()
endfunction()

# Each instruction set is its own translation unit (backend_SET.cpp) with its own flags; which
# one runs is decided by the processor at import, never by the machine that built it.
#
# So these units must emit no weak symbol: of equal ones the linker keeps any, and other units would
# call code that their processor lacks. Everything in them lives in unnamed namespaces; what they use
# of shared headers and of std is small enough to be inlined always, and no std container is among it.
# tests/test_instruction_set_units.py looks at the objects.
function(kvell_add_backends name)
  target_sources(${name} PRIVATE backend_portable.cpp)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    set(avx2_flags -mavx2 -mfma)
    # gcc 12 warns about its own intrinsics' undefined() values.
    set(avx512f_flags -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma
        -Wno-uninitialized -Wno-maybe-uninitialized)
    set(avx512_flags ${avx512f_flags} -mavx512bf16 -mavx512vbmi)
    set(sets avx2 avx512f avx512)
    if(CMAKE_SYSTEM_NAME STREQUAL "Linux")  # which has to be asked for the tiles' registers
      set(amx_flags ${avx512_flags} -mamx-tile -mamx-bf16 -mprfchw)
      list(APPEND sets amx)
    endif()
    if(KVELL_EMULATE)
      set(avx512_flags ${avx512f_flags} -include cpu/emulated.h)
      set(amx_flags ${avx512_flags} -mprfchw)
    endif()
    foreach(set ${sets})
      string(REPLACE ";" " " joined "${${set}_flags}")
      if(KVELL_EMULATE)
        set(KVELL_COMPILES_${set} ON)
      else()
        check_cxx_compiler_flag("${joined}" KVELL_COMPILES_${set})
      endif()
      if(KVELL_COMPILES_${set} AND EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/backend_${set}.cpp")
        target_sources(${name} PRIVATE backend_${set}.cpp)
        set_source_files_properties(backend_${set}.cpp PROPERTIES
          COMPILE_OPTIONS "${${set}_flags}")
        string(TOUPPER ${set} upper)
        target_compile_definitions(${name} PRIVATE KVELL_HAS_${upper}=1)
      endif()
    endforeach()
  endif()
endfunction()

# Kernels that several modules link.
function(kvell_add_kernel_objects name)
  add_library(${name} OBJECT ${ARGN})
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden)
  kvell_set_flags(${name} -O3)
  kvell_set_up(${name})
  kvell_add_backends(${name})
endfunction()

# An extension module.
function(kvell_add_module name destination)
  kvell_add_extension(${name} ${destination} -O3 ${ARGN})
  kvell_set_up(${name})
endfunction()

# An extension module with kernels of its own.
function(kvell_add_kernels name destination)
  kvell_add_module(${name} ${destination} ${ARGN})
  kvell_add_backends(${name})
endfunction()
