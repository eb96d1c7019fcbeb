#pragma once
#include <cstddef>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace slimtensors {

// Call `work(0)` … `work(count - 1)` on several threads, and throw the first of what they throw.
//
// With OpenMP the threads are torch's own, as many as it has: asking for fewer would end the others. After each
// of torch's loops they keep their cores busy for a while, and threads of ours would have to share what is left:
// on two cores, a product took longer by two than by one.
template <class Work>
void on_threads(std::size_t count, const Work& work) {
    std::vector<std::exception_ptr> thrown(count);
    const auto run = [&](std::size_t i) {
        try {
            work(i);
        } catch (...) {
            thrown[i] = std::current_exception();
        }
    };
#ifdef _OPENMP
#pragma omp parallel for schedule(static, 1) if (count > 1)
    for (std::size_t i = 0; i < count; ++i) run(i);
#else
    std::vector<std::thread> others;
    for (std::size_t i = 1; i < count; ++i) {
        try {
            others.emplace_back(run, i);
        } catch (const std::system_error&) {  // there are no more threads to be had
            run(i);
        }
    }
    run(0);
    for (auto& other : others) other.join();
#endif
    for (const auto& error : thrown)
        if (error) std::rethrow_exception(error);
}

}  // namespace slimtensors
