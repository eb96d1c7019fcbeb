#pragma once
#include <cstddef>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace slimtensors {

// Call `work(0)` … `work(count - 1)` on several threads and rethrow the first exception.
//
// With OpenMP, these are torch's threads, all of them: requesting fewer would terminate the others. After a
// parallel loop torch's threads keep spinning for a while, so threads of our own would compete with them: on
// two cores, a product took longer with two threads than with one.
template <class Work>
void parallel_for(std::size_t count, const Work& work) {
    std::vector<std::exception_ptr> errors(count);
    const auto run = [&](std::size_t i) {
        try {
            work(i);
        } catch (...) {
            errors[i] = std::current_exception();
        }
    };
#ifdef _OPENMP
#pragma omp parallel for schedule(static, 1) if (count > 1)
    for (std::size_t i = 0; i < count; ++i) run(i);
#else
    std::vector<std::thread> threads;
    for (std::size_t i = 1; i < count; ++i) {
        try {
            threads.emplace_back(run, i);
        } catch (const std::system_error&) {  // thread limit reached
            run(i);
        }
    }
    run(0);
    for (auto& thread : threads) thread.join();
#endif
    for (const auto& error : errors)
        if (error) std::rethrow_exception(error);
}

}  // namespace slimtensors
