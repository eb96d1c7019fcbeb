# slim_core: the algorithms, shared by the Python module and the fuzz targets. Depends on neither Python nor torch.
#
# Kernel sources are compiled once per instruction set, each copy in a namespace of its own (core/target.h). Which
# copy runs is decided at run time (core/dispatch.h).
set(slim_root ${CMAKE_CURRENT_LIST_DIR})
set(slim_sources
  bins/bins.cpp
  bins/fit.cpp
  bins/magnitudes.cpp
  bins/model.cpp
  bins/rans.cpp
  bitmask/bitmask.cpp
  core/counting.cpp
  core/crc32c.cpp
  core/dispatch.cpp
  core/histogram.cpp
  core/logarithms.cpp
  core/planes.cpp
  huffman/code.cpp
  huffman/huffman.cpp
  huffman/streams.cpp
  linear/linear.cpp
  masks/density.cpp
  masks/density_fit.cpp
  masks/density_model.cpp
  masks/gaps.cpp
  masks/mask24.cpp
  quantize/quantize.cpp
  quantize/squares.cpp
  residual/difference.cpp
  residual/expected.cpp
  residual/expected_fit.cpp
  residual/expected_model.cpp
  residual/grouping.cpp
  residual/sparse.cpp
  trellis/matrix.cpp
  trellis/model.cpp
  trellis/quantize.cpp
  trellis/side.cpp
  trellis/trellis.cpp)
set(slim_kernels_sources # for every instruction set
  bitmask/kernels.cpp
  core/counting_kernels.cpp
  core/planes_kernels.cpp
  huffman/kernels.cpp
  linear/kernels.cpp
  quantize/kernels.cpp
  residual/sparse_kernels.cpp
  trellis/quantize_kernels.cpp)
set(slim_kernels_plain_sources ${slim_kernels_sources} bins/kernels_plain.cpp masks/density_kernels_plain.cpp
  residual/expected_kernels_plain.cpp trellis/kernels_plain.cpp)
set(slim_kernels_crc_sources core/crc32c_hardware.cpp)
set(slim_kernels_avx2_sources ${slim_kernels_sources} bins/kernels_avx2.cpp masks/density_kernels_avx2.cpp
  residual/expected_kernels_avx2.cpp trellis/kernels_avx2.cpp)
set(slim_kernels_avx512_sources linear/kernels.cpp)

list(TRANSFORM slim_sources PREPEND ${slim_root}/)
add_library(slim_core STATIC ${slim_sources})
set_target_properties(slim_core PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_compile_features(slim_core PUBLIC cxx_std_20)
target_include_directories(slim_core PUBLIC ${slim_root})
# Quantization must round as torch does, so products are never fused with sums. Without -fno-trapping-math,
# loops with a conditional are not vectorized.
set(slim_options -Wall -Wextra $<$<CONFIG:Release>:-O3> -ffp-contract=off -fno-trapping-math)
target_compile_options(slim_core PRIVATE ${slim_options})
find_package(Threads REQUIRED)
target_link_libraries(slim_core PUBLIC Threads::Threads)
# torch for Linux uses GCC's OpenMP too: both request libgomp.so.1 and share one copy (core/parallel.h).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  find_package(OpenMP COMPONENTS CXX)
  if(OpenMP_CXX_FOUND)
    target_link_libraries(slim_core PUBLIC OpenMP::OpenMP_CXX)
  endif()
endif()

# Compile the kernels of one instruction set with the given flags.
function(slim_add_kernels isa)
  list(TRANSFORM slim_kernels_${isa}_sources PREPEND ${slim_root}/)
  add_library(slim_kernels_${isa} OBJECT ${slim_kernels_${isa}_sources})
  set_target_properties(slim_kernels_${isa} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_compile_features(slim_kernels_${isa} PRIVATE cxx_std_20)
  target_include_directories(slim_kernels_${isa} PRIVATE ${slim_root})
  target_compile_definitions(slim_kernels_${isa} PRIVATE SLIM_TARGET=${isa})
  target_compile_options(slim_kernels_${isa} PRIVATE ${slim_options} ${ARGN})
  target_sources(slim_core PRIVATE $<TARGET_OBJECTS:slim_kernels_${isa}>)
endfunction()

slim_add_kernels(plain)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_compile_definitions(slim_core PUBLIC SLIMTENSORS_X86)
  set(slim_avx2_flags -mavx2 -mbmi -mbmi2 -mpopcnt -mfma)
  slim_add_kernels(crc -msse4.2)
  slim_add_kernels(avx2 ${slim_avx2_flags})
  # GCC 12 warns about its own header.
  slim_add_kernels(avx512 ${slim_avx2_flags} -mavx512f
    $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized> $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
else()
  slim_add_kernels(crc)
endif()
