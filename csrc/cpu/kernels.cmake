include(CheckCXXCompilerFlag)
find_package(OpenMP)
set(KVELL_SETS "all" CACHE STRING "Instruction sets that kernels are compiled for besides the portable form: \
all, native (the best of this machine's processor), or a list of names")

# The names of which each module compiles the first that it can: those of this machine's processor, best
# first. Asked again at each configuration, for a build tree may have come from another machine.
set(KVELL_PROCESSOR_SETS "")
if(KVELL_SETS STREQUAL "native")
  try_run(KVELL_SETS_STATUS KVELL_SETS_COMPILED
    SOURCES "${CMAKE_SOURCE_DIR}/csrc/cpu/print_sets.cpp"
    CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${CMAKE_SOURCE_DIR}/csrc"
    RUN_OUTPUT_VARIABLE KVELL_PROCESSOR_SETS
    NO_CACHE)
  if(NOT KVELL_SETS_COMPILED OR NOT KVELL_SETS_STATUS EQUAL 0)
    message(FATAL_ERROR "KVELL_SETS=native: this machine's processor cannot be asked; use all")
  endif()
  message(STATUS "Instruction sets of this processor: ${KVELL_PROCESSOR_SETS}")
endif()

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
#
# Of the forms that are there only dispatch.cpp knows, so another choice of sets compiles nothing twice.
# amx_needs: sets of this folder whose units backend_amx.cpp calls.
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
    set(forms "")
    foreach(set ${sets})
      kvell_compiles(compiles ${set} "${${set}_flags}")
      if(compiles)
        list(APPEND forms ${set})
      endif()
    endforeach()
    kvell_choose_forms(forms)
    foreach(set ${forms})
      target_sources(${name} PRIVATE backend_${set}.cpp)
      set_source_files_properties(backend_${set}.cpp PROPERTIES COMPILE_OPTIONS "${${set}_flags}")
      string(TOUPPER ${set} upper)
      set_property(SOURCE dispatch.cpp APPEND PROPERTY COMPILE_DEFINITIONS KVELL_HAS_${upper}=1)
    endforeach()
  endif()
endfunction()

# Does this folder have a unit for a set, and the compiler its flags?
function(kvell_compiles to set flags)
  set(${to} OFF PARENT_SCOPE)
  if(EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/backend_${set}.cpp")
    string(REPLACE ";" " " joined "${flags}")
    if(NOT KVELL_EMULATE)
      check_cxx_compiler_flag("${joined}" KVELL_COMPILES_${set})
    endif()
    if(KVELL_EMULATE OR KVELL_COMPILES_${set})
      set(${to} ON PARENT_SCOPE)
    endif()
  endif()
endfunction()

# Leaves of the sets in a list those that KVELL_SETS asks for.
function(kvell_choose_forms sets)
  set(asked ${KVELL_SETS})
  if(KVELL_SETS STREQUAL "all")
    set(asked ${${sets}})
  elseif(KVELL_SETS STREQUAL "native")
    set(asked "")
    foreach(set ${KVELL_PROCESSOR_SETS})
      if(NOT asked AND set IN_LIST ${sets})
        set(asked ${set} ${${set}_needs})
      endif()
    endforeach()
  endif()
  set(chosen "")
  foreach(set ${${sets}})
    if(set IN_LIST asked)
      list(APPEND chosen ${set})
    endif()
  endforeach()
  set(${sets} "${chosen}" PARENT_SCOPE)
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
