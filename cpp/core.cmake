# The core library, shared by the Python module and the fuzz targets.
# One file per instruction set: what a file may assume is set here, which one runs is decided at run time (cpu.h).
add_library(slim_core STATIC
  ${CMAKE_CURRENT_LIST_DIR}/core/dispatch.cpp
  ${CMAKE_CURRENT_LIST_DIR}/bitmask/bitmask.cpp
  ${CMAKE_CURRENT_LIST_DIR}/bitmask/kernels_plain.cpp
  ${CMAKE_CURRENT_LIST_DIR}/core/counting.cpp
  ${CMAKE_CURRENT_LIST_DIR}/core/group_peaks.cpp
  ${CMAKE_CURRENT_LIST_DIR}/masks/mask24.cpp
  ${CMAKE_CURRENT_LIST_DIR}/residual/difference.cpp
  ${CMAKE_CURRENT_LIST_DIR}/residual/grouping.cpp
  ${CMAKE_CURRENT_LIST_DIR}/core/planes.cpp
  ${CMAKE_CURRENT_LIST_DIR}/huffman/code.cpp
  ${CMAKE_CURRENT_LIST_DIR}/huffman/streams.cpp
  ${CMAKE_CURRENT_LIST_DIR}/huffman/huffman.cpp
  ${CMAKE_CURRENT_LIST_DIR}/bins/model.cpp
  ${CMAKE_CURRENT_LIST_DIR}/bins/magnitudes.cpp
  ${CMAKE_CURRENT_LIST_DIR}/bins/fit.cpp
  ${CMAKE_CURRENT_LIST_DIR}/bins/rans.cpp
  ${CMAKE_CURRENT_LIST_DIR}/bins/kernels_plain.cpp
  ${CMAKE_CURRENT_LIST_DIR}/bins/bins.cpp
  ${CMAKE_CURRENT_LIST_DIR}/core/crc32c.cpp
  ${CMAKE_CURRENT_LIST_DIR}/core/crc32c_hardware.cpp
  ${CMAKE_CURRENT_LIST_DIR}/masks/gaps.cpp
  ${CMAKE_CURRENT_LIST_DIR}/masks/density.cpp
  ${CMAKE_CURRENT_LIST_DIR}/masks/density_fit.cpp
  ${CMAKE_CURRENT_LIST_DIR}/masks/density_model.cpp
  ${CMAKE_CURRENT_LIST_DIR}/masks/density_kernels_plain.cpp
  ${CMAKE_CURRENT_LIST_DIR}/quantize/quantize.cpp
  ${CMAKE_CURRENT_LIST_DIR}/quantize/kernels_plain.cpp
  ${CMAKE_CURRENT_LIST_DIR}/quantize/squares.cpp
  ${CMAKE_CURRENT_LIST_DIR}/quantize/squares_plain.cpp
  ${CMAKE_CURRENT_LIST_DIR}/linear/linear.cpp
  ${CMAKE_CURRENT_LIST_DIR}/linear/kernels_plain.cpp)
set_target_properties(slim_core PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_compile_features(slim_core PUBLIC cxx_std_20)
target_compile_options(slim_core PRIVATE -Wall -Wextra $<$<CONFIG:Release>:-O3>)
# Quantization must round as torch does: no product may be added unrounded. Nobody asks for traps, which keep
# loops with a choice from becoming vector code.
target_compile_options(slim_core PRIVATE -ffp-contract=off -fno-trapping-math)
target_include_directories(slim_core PUBLIC ${CMAKE_CURRENT_LIST_DIR})
find_package(Threads REQUIRED)
target_link_libraries(slim_core PUBLIC Threads::Threads)
# GCC's OpenMP is torch's on Linux: both ask for libgomp.so.1, and the loader gives them the same one (threads.h).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  find_package(OpenMP COMPONENTS CXX)
  if(OpenMP_CXX_FOUND)
    target_link_libraries(slim_core PUBLIC OpenMP::OpenMP_CXX)
  endif()
endif()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_compile_definitions(slim_core PUBLIC SLIMTENSORS_X86)
  set(avx2
    ${CMAKE_CURRENT_LIST_DIR}/bitmask/kernels_avx2.cpp
    ${CMAKE_CURRENT_LIST_DIR}/core/counting_kernels.cpp
    ${CMAKE_CURRENT_LIST_DIR}/core/group_peaks_avx2.cpp
    ${CMAKE_CURRENT_LIST_DIR}/core/planes_kernels.cpp
    ${CMAKE_CURRENT_LIST_DIR}/huffman/kernels_avx2.cpp
    ${CMAKE_CURRENT_LIST_DIR}/bins/kernels_avx2.cpp
    ${CMAKE_CURRENT_LIST_DIR}/masks/density_kernels_avx2.cpp
    ${CMAKE_CURRENT_LIST_DIR}/quantize/kernels_avx2.cpp
    ${CMAKE_CURRENT_LIST_DIR}/quantize/squares_avx2.cpp
    ${CMAKE_CURRENT_LIST_DIR}/linear/kernels_avx2.cpp)
  target_sources(slim_core PRIVATE ${avx2})
  set_source_files_properties(${avx2} PROPERTIES COMPILE_OPTIONS "-mavx2;-mbmi;-mbmi2;-mpopcnt")
  set_property(SOURCE ${CMAKE_CURRENT_LIST_DIR}/linear/kernels_avx2.cpp APPEND PROPERTY COMPILE_OPTIONS "-mfma")
  target_sources(slim_core PRIVATE ${CMAKE_CURRENT_LIST_DIR}/linear/kernels_avx512.cpp)
  # GCC 12 warns of its own header.
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/linear/kernels_avx512.cpp PROPERTIES COMPILE_OPTIONS
    "-mavx2;-mfma;-mavx512f;$<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized;-Wno-maybe-uninitialized>")
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/core/crc32c_hardware.cpp PROPERTIES COMPILE_OPTIONS "-msse4.2")
endif()
